"""What operators do, in memory, over the same ledger as the fake step store."""

from __future__ import annotations

from pydantic import JsonValue

from clawloop.contracts.training import SampleState, TrainingView, VersionView
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable, RequestRejected
from clawloop.ids import SampleId
from clawloop.recipes.recipe import Recipe
from db.training.step_transitions import metrics_of, trained_words
from tests.fakes.ledger import FakeLedger, FakePolicy, FakeVersion


class FakeTrainingStore:
    """Satisfies `api.ports.TrainingStore`."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger

    async def look(self, policy: str) -> TrainingView:
        self._held(policy)
        return self.ledger.view(policy)

    async def versions(self, policy: str) -> list[VersionView]:
        self._held(policy)
        own = [(n, version) for (name, n), version in sorted(self.ledger.versions.items()) if name == policy]
        return [self._view(policy, n, version) for n, version in own]

    async def pause(self, policy: str, reason: str) -> TrainingView:
        self._held(policy).paused = reason
        self.ledger.refresh_work(policy)
        return self.ledger.view(policy)

    async def resume(self, policy: str, *, retry_quarantined: bool = False) -> TrainingView:
        self._held(policy).paused = None
        for sample in self.ledger.samples.values():
            if retry_quarantined and sample.policy == policy and sample.state is SampleState.QUARANTINED:
                sample.end(SampleState.FRESH, TurnOutcome.SAMPLED, sample.said)
        if retry_quarantined:
            self.ledger.expire_other_signals(policy)
        self.ledger.refresh_work(policy)
        return self.ledger.view(policy)

    async def roll_back(self, policy: str, version: int) -> TrainingView:
        held = self._held(policy)
        self._with_files(policy, version)
        if held.pinned not in (None, version):
            problem = (
                f"Version {held.pinned} of policy {policy!r} is pinned, so {version} could not answer: unpin first."
            )
            raise RequestRejected(problem, status=409, code="version_pinned", field="version")
        before, after = set(self.ledger.path(policy, held.head)), set(self.ledger.path(policy, version))
        held.head, held.epoch = version, held.epoch + 1
        if (claimed := self.ledger.claimed(policy)) is not None:
            self.ledger.abandon(policy, claimed, f"rolled back to version {version}")
        for n in before ^ after:
            step = self.ledger.steps.get((policy, n))
            made = None if step is None else step.trained
            for sample in self._trained_in(policy, n):
                found = self.ledger.samples[sample]
                found.why = trained_words(n, None if made is None else made.figures.without_hint.get(sample))
                found.outcome = TurnOutcome.TRAINED
                if n in before:
                    found.outcome, found.why = TurnOutcome.ROLLED_BACK, f"{found.why}, rolled back to {version}"
        if self.ledger.is_served(policy, version):
            self.ledger.set_active(policy, version)
        return self.ledger.view(policy)

    async def pin(self, policy: str, version: int) -> TrainingView:
        held = self._held(policy)
        self._with_files(policy, version)
        held.pinned = version
        if self.ledger.is_served(policy, version):
            self.ledger.set_active(policy, version)
        return self.ledger.view(policy)

    async def unpin(self, policy: str) -> TrainingView:
        held = self._held(policy)
        if held.pinned is not None:
            held.pinned = None
            if self.ledger.is_served(policy, held.head):
                self.ledger.set_active(policy, held.head)
        return self.ledger.view(policy)

    async def recipe(self, policy: str) -> Recipe:
        if (recipe := self._held(policy).recipe) is None:
            problem = f"policy {policy!r} has no recipe."
            raise RequestRejected(problem, status=404, code="recipe_not_found", field="policy")
        return recipe

    async def set_recipe(self, policy: str, recipe: Recipe) -> TrainingView:
        self._held(policy).recipe = recipe
        self.ledger.expire_other_signals(policy)
        self.ledger.refresh_work(policy)
        return self.ledger.view(policy)

    def _held(self, policy: str) -> FakePolicy:
        try:
            return self.ledger.held(policy)
        except RecordUnusable as error:
            problem = f"There is no policy {policy!r}."
            raise RequestRejected(problem, status=404, code="policy_not_found", field="policy") from error

    def _with_files(self, policy: str, version: int) -> None:
        found = self.ledger.versions.get((policy, version))
        if found is None:
            problem = f"Policy {policy!r} has no version {version}."
            raise RequestRejected(problem, status=404, code="version_not_found", field="version")
        if found.removed:
            problem = f"The files of version {version} of policy {policy!r} were removed."
            raise RequestRejected(problem, status=409, code="version_removed", field="version")

    def _trained_in(self, policy: str, n: int) -> list[SampleId]:
        step = self.ledger.steps.get((policy, n))
        trained = SampleState.TRAINED
        return [] if step is None else [one for one in step.samples if self.ledger.samples[one].state is trained]

    def _view(self, policy: str, n: int, version: FakeVersion) -> VersionView:
        held = self.ledger.policies[policy]
        path = self.ledger.path(policy, held.head)
        place = "head" if n == held.head else "on the path" if n in path else "rolled back"
        words = ["active"] * (n == held.active) + ["pinned"] * (n == held.pinned) + [place]
        step = self.ledger.steps.get((policy, n))
        metrics: dict[str, JsonValue] | None = None
        if step is not None and step.trained is not None:
            metrics = metrics_of(step.trained)
        return VersionView(
            n=n,
            parent=version.parent,
            state=", ".join(words + ["files removed"] * version.removed),
            active=n == held.active,
            pinned=n == held.pinned,
            engines=sorted(engine for engine, own, loaded in self.ledger.loaded if (own, loaded) == (policy, n)),
            metrics=metrics,
            created_at=version.made_at,
        )
