"""Policies and engines in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clawloop.core.contracts.lessons import PolicyLessons
from clawloop.core.contracts.serving import Directory, Engine, Policy
from clawloop.core.errors import StoreUnavailable


class FakeDirectoryStore:
    """
    Attributes:
        available: False makes every call raise StoreUnavailable.
    """

    def __init__(self, directory: Directory) -> None:
        self.available = True
        self._directory = directory

    async def read(self) -> Directory:
        if not self.available:
            raise StoreUnavailable("the fake is set to be unavailable")
        return self._directory

    def set_engines(self, engines: Sequence[Engine]) -> None:
        self._directory = replace(self._directory, engines=tuple(engines))

    def add_policy(self, policy: Policy, versions: frozenset[int]) -> None:
        """Add a policy whose versions every engine has loaded."""
        engines = [
            replace(engine, versions=engine.versions | {policy.id: versions}) for engine in self._directory.engines
        ]
        self._directory = Directory((*self._directory.policies, replace(policy, kept=versions)), tuple(engines))

    def set_lessons(self, lessons: PolicyLessons | None, of: str = "default") -> None:
        """Give a policy these lessons."""
        policies = tuple(
            replace(policy, lessons=lessons) if policy.id == of else policy for policy in self._directory.policies
        )
        self._directory = replace(self._directory, policies=policies)

    def set_active(self, version: int, versions: frozenset[int] | None = None) -> None:
        """Make this version every policy's active one.

        Args:
            versions: those that every engine has loaded; None: only this one.
        """
        loaded = frozenset({version}) if versions is None else versions
        policies = tuple(replace(policy, active=version, kept=loaded - {0}) for policy in self._directory.policies)
        engines = tuple(
            replace(engine, versions={policy.id: loaded for policy in policies}) for engine in self._directory.engines
        )
        self._directory = Directory(policies, engines)
