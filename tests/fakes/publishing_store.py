"""Publishing in memory, over the same ledger as the fake step store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from clawloop.core.contracts.serving import AdapterDirectory, Engine
from clawloop.core.contracts.training import SampleState, StepState, VersionRef
from clawloop.core.errors import RecordUnusable
from clawloop.core.recipes.recipe import Train
from tests.fakes.ledger import FakeLedger, FakeVersion


class FakePublishingStore:
    """Satisfies `activities.serving.publishing.PublishingStore`."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger

    async def engines(self) -> list[Engine]:
        has: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for engine, policy, n in self.ledger.loaded:
            has[engine][policy].add(n)
        return [
            replace(engine, versions={policy: frozenset(own) for policy, own in has[engine.id].items()})
            for _, engine in sorted(self.ledger.engines.items())
        ]

    async def wanted(self, engine_id: str) -> list[VersionRef]:
        own = [ref for (policy, n), version in self._versions() if (ref := version.ref) and self._wants(policy, n)]
        return sorted(own, key=lambda ref: (self.ledger.versions[ref.policy, ref.n].made_at, ref.policy, ref.n))

    async def loaded(self, engine_id: str, policy: str, n: int) -> None:
        if engine_id not in self.ledger.engines or (policy, n) not in self.ledger.versions:
            raise RecordUnusable(f"there is no engine {engine_id!r} or no version {n} of {policy!r}")
        self.ledger.loaded.setdefault((engine_id, policy, n), self.ledger.now)

    async def unloaded(self, engine_id: str, policy: str, n: int) -> None:
        self.ledger.loaded.pop((engine_id, policy, n), None)

    async def forget(self, engine_id: str) -> None:
        for key in [key for key in self.ledger.loaded if key[0] == engine_id]:
            del self.ledger.loaded[key]

    async def report(self, engine_id: str, problem: str | None) -> None:
        if (engine := self.ledger.engines.get(engine_id)) is not None:
            self.ledger.engines[engine_id] = replace(engine, problem=problem)

    async def activate(self, policy: str, n: int, epoch: int) -> bool:
        policy_row = self.ledger.require_policy(policy)
        if policy_row.epoch != epoch or policy_row.pinned not in (None, n):
            return False
        if policy_row.active == n:
            return True
        if (policy, n) not in self.ledger.versions:
            raise RecordUnusable(f"policy {policy!r} has no version {n}")
        path = self.ledger.path(policy, policy_row.head)
        forward = n in path and (policy_row.active not in path or path.index(n) < path.index(policy_row.active))
        if not self.ledger.is_served(policy, n) or (policy_row.pinned is None and not forward):
            return False
        self.ledger.set_active(policy, n)
        return True

    async def unloadable(self, engine_id: str, age: timedelta) -> list[VersionRef]:
        latest = self.ledger.now - age
        return [
            ref
            for (policy, n), version in self._versions()
            if (loaded_at := self.ledger.loaded.get((engine_id, policy, n))) is not None
            and (ref := version.ref) is not None
            and not self._wants(policy, n)
            and max(version.retired_at or loaded_at, loaded_at) <= latest
        ]

    async def removable(self, age: timedelta) -> list[VersionRef]:
        latest = self.ledger.now - age
        return [
            ref
            for (policy, n), version in self._versions()
            if (ref := version.ref) is not None
            and not version.removed
            and not self._wants(policy, n)
            and version.made_at <= latest
            and (version.retired_at is None or version.retired_at <= latest)
            and not self._needed(policy, n)
        ]

    async def mark_removed(self, policy: str, n: int, age: timedelta) -> bool:
        if all((version.policy, version.n) != (policy, n) for version in await self.removable(age)):
            return False
        self.ledger.versions[policy, n].removed = True
        return True

    async def has_files_at(self, path: str) -> bool:
        return any(one.ref and one.ref.path == path and not one.removed for _, one in self._versions())

    async def leftover(self, directories: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
        kept = {version.ref.path for _, version in self._versions() if version.ref and not version.removed}
        return [
            one
            for one in directories
            if (step := self.ledger.steps.get((one.policy, one.n))) is not None
            and step.state is not StepState.CLAIMED
            and one.path not in kept
        ]

    def _needed(self, policy: str, n: int) -> bool:
        opened = self.ledger.open_step(policy)
        head, count = self.ledger.policies[policy].head, Train().kept_versions
        rejected = [
            step_n
            for (own, step_n), step in sorted(self.ledger.steps.items())
            if own == policy and step.parent == head and step.state is StepState.REJECTED
        ]
        kept = [*self.ledger.path(policy, head)[:count], *rejected[-count:]]
        waiting = (SampleState.FRESH, SampleState.CLAIMED)
        return (
            n in kept
            or (opened is not None and self.ledger.steps[policy, opened].parent == n)
            or any(own == policy and version == n for _, own, version in self.ledger.loaded)
            or any(
                one.policy == policy and one.of.version == n and one.of.hinted_prompts and one.state in waiting
                for one in self.ledger.samples.values()
            )
        )

    def _versions(self) -> list[tuple[tuple[str, int], FakeVersion]]:
        return sorted(self.ledger.versions.items(), key=lambda item: item[0])

    def _wants(self, policy: str, n: int) -> bool:
        policy_row = self.ledger.policies[policy]
        step = self.ledger.steps.get((policy, n))
        is_candidate = step is not None and step.state is StepState.CANDIDATE
        return (
            n > 0
            and (n in (policy_row.head, policy_row.active, policy_row.pinned) or is_candidate)
            and not self.ledger.versions[policy, n].removed
        )
