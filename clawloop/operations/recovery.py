"""Brings Temporal in line with PostgreSQL after either lost data, and names what PostgreSQL does not know.

PostgreSQL is the truth: what waits there is signalled again. Workflows drop messages that they have handled already,
and stored votes and judgements are found, so that nothing is judged twice. Idempotent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from clawloop.contracts.adapter_directory import AdapterDirectory
from clawloop.contracts.sessions import RejudgeRequested, SessionFacts, WaitingWork
from clawloop.ids import SessionId

# Ids in one query; more would make its text large for no gain.
_CHUNK = 1000


class RecoveryStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def forget_signals(self) -> WaitingWork:
        """Mark what waits as never signalled, so that the sweep signals it: turns of open sessions, feedback."""

    async def open_rejudgements(self) -> list[tuple[SessionFacts, RejudgeRequested]]:
        """The judgements that an operator asked for and that are not decided."""

    async def newest_versions(self) -> dict[str, int]:
        """Each policy's newest version."""

    async def known_sessions(self, sessions: Sequence[SessionId]) -> frozenset[SessionId]:
        """Those of the sessions that are stored."""

    async def known_steps(self, policies: Collection[str]) -> frozenset[tuple[str, int]]:
        """The steps of these policies, whatever became of them."""


class RecoveryWorkflows(Protocol):
    """Every call raises SignalFailed when Temporal does not answer or refuses."""

    async def prepare(self) -> None:
        """Register what every namespace needs: search attributes and the sweep's schedule. Idempotent."""

    async def shown_version(self, policy: str) -> int | None:
        """The version that the policy's workflow showed last; None if there is no workflow or it shows none."""

    async def restart_training(self, policy: str) -> None:
        """End the policy's workflow, if it runs, and start it again: it decides by PostgreSQL alone."""

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None: ...

    async def sweep(self) -> None:
        """Start a sweep now."""

    def sessions(self) -> AsyncIterator[SessionId]:
        """The sessions that have a workflow, open or closed."""


class AdapterDirectories(Protocol):
    async def directories(self) -> list[AdapterDirectory]:
        """The complete versions on this machine's disk."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """
    Args:
        waiting: what the sweep signals again.
        rejudged: judgements asked for again.
        policies: whose training workflow was started again.
        unknown: what Temporal or the disk holds and PostgreSQL does not: one line each.
    """

    waiting: WaitingWork
    rejudged: int
    policies: tuple[str, ...]
    unknown: tuple[str, ...]


class Recovery:
    """
    Args:
        adapters: None: the adapters are on another machine.
    """

    def __init__(self, store: RecoveryStore, workflows: RecoveryWorkflows, adapters: AdapterDirectories | None) -> None:
        self._store = store
        self._workflows = workflows
        self._adapters = adapters

    async def recover(self) -> Recovered:
        """
        Raises:
            SignalFailed, StoreUnavailable: run it again; what was done is not done twice.
        """
        await self._workflows.prepare()
        newest = await self._store.newest_versions()
        unknown = [*await self._unknown_versions(newest), *await self._unknown_sessions()]
        for policy in newest:
            await self._workflows.restart_training(policy)
        rejudgements = await self._store.open_rejudgements()
        for session, request in rejudgements:
            await self._workflows.rejudge(session, request)
        waiting = await self._store.forget_signals()
        await self._workflows.sweep()
        return Recovered(waiting, len(rejudgements), tuple(newest), tuple(unknown))

    async def _unknown_versions(self, newest: dict[str, int]) -> list[str]:
        lines = []
        for policy, version in newest.items():
            shown = await self._workflows.shown_version(policy)
            if shown is not None and shown > version:
                lines.append(f"version {shown} of policy {policy} answered; PostgreSQL's newest version is {version}")
        directories = [] if self._adapters is None else await self._adapters.directories()
        steps = await self._store.known_steps({directory.policy for directory in directories})
        # A step that PostgreSQL knows made the others: the sweep deletes what an attempt at it left behind.
        lost = [directory for directory in directories if (directory.policy, directory.n) not in steps]
        return lines + [f"adapters/{directory.path}: PostgreSQL knows no such step" for directory in lost]

    async def _unknown_sessions(self) -> list[str]:
        lines: list[str] = []
        chunk: list[SessionId] = []

        async def check() -> None:
            known = await self._store.known_sessions(chunk)
            lines.extend(
                f"session {session}: PostgreSQL has no such session" for session in chunk if session not in known
            )
            chunk.clear()

        async for session in self._workflows.sessions():
            chunk.append(session)
            if len(chunk) == _CHUNK:
                await check()
        if chunk:
            await check()
        return lines
