"""Operators' changes in memory, over the same ledger as the fake step store."""

from __future__ import annotations

from dataclasses import replace

from pydantic import JsonValue

from clawloop.core.contracts.training import (
    BroughtAdapter,
    SampleState,
    StepState,
    TrainingView,
    VersionOrigin,
    VersionRef,
    VersionView,
    gate_seconds,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound, RecordUnusable, StateConflict
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Recipe
from db.training.operators import version_place
from db.training.steps import metrics_of, trained_detail
from tests.fakes.ledger import FakeLedger, FakePolicy, FakeVersion


class FakeTrainingStore:
    """Satisfies `clawloop.operations.training.TrainingStore`."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger

    async def status(self, policy: str) -> TrainingView:
        self._require_policy(policy)
        return self.ledger.view(policy)

    async def versions(self, policy: str) -> list[VersionView]:
        self._require_policy(policy)
        own = [(n, version) for (name, n), version in sorted(self.ledger.versions.items()) if name == policy]
        return [self._view(policy, n, version) for n, version in own]

    async def create_policy(
        self, name: str, like: str, recipe: Recipe | None, version: int = 0, brought: BroughtAdapter | None = None
    ) -> TrainingView:
        model = self._changeable(like)
        self._with_files(like, version)
        self._accepted(like, version)
        if name in self.ledger.policies:
            raise StateConflict(f"There is a policy {name!r} already.", code="policy_exists", field="name")
        learns = recipe or model.recipe
        begun = self.ledger.versions[like, version]
        if begun.ref is not None:
            origin = begun.origin or VersionOrigin(like, version)
            made = self.ledger.steps[origin.policy, origin.n].recipe.train.lora
            if learns is not None and (made.rank, made.alpha) != (learns.train.lora.rank, learns.train.lora.alpha):
                raise StateConflict("The recipe has another rank.", code="recipe_conflict", field="version")
            ref = replace(begun.ref, policy=name, n=1, parent=0)
            self.ledger.versions[name, 1] = FakeVersion(0, ref, self.ledger.now, origin=origin)
        if brought is not None:
            lora = None if learns is None else learns.train.lora
            if lora is not None and (brought.rank, brought.alpha) != (lora.rank, lora.alpha):
                raise StateConflict("The recipe has another rank.", code="recipe_conflict", field="recipe")
            ref = VersionRef(name, 1, 0, brought.path, brought.sha256)
            self.ledger.versions[name, 1] = FakeVersion(0, ref, self.ledger.now)
        self.ledger.add_policy(name, learns).head = 1 if (name, 1) in self.ledger.versions else 0
        return self.ledger.view(name)

    async def retire_policy(self, policy: str) -> TrainingView:
        found = self._changeable(policy)
        if policy == "default":
            raise StateConflict("The default policy cannot be retired.", code="policy_needed", field="policy")
        found.retired, found.paused = True, "the policy is retired"
        self.ledger.refresh_work_flag(policy)
        return self.ledger.view(policy)

    async def pause(self, policy: str, reason: str) -> TrainingView:
        self._changeable(policy).paused = reason
        self.ledger.refresh_work_flag(policy)
        return self.ledger.view(policy)

    async def resume(self, policy: str, *, retry_quarantined: bool = False) -> TrainingView:
        policy_row = self._changeable(policy)
        policy_row.paused, policy_row.rejections = None, 0
        for sample in self.ledger.samples.values():
            if retry_quarantined and sample.policy == policy and sample.state is SampleState.QUARANTINED:
                sample.end(SampleState.FRESH, TurnOutcome.SAMPLED, sample.judgement_reason)
        if retry_quarantined:
            self.ledger.expire_samples_of_other_signal(policy)
        self.ledger.refresh_work_flag(policy)
        return self.ledger.view(policy)

    async def roll_back(self, policy: str, version: int, recipe: Recipe | None = None) -> TrainingView:
        self._changeable(policy)
        self._with_files(policy, version)
        self._accepted(policy, version)
        self._unpinned(policy, version)
        view = self._continue_from(policy, version, f"rolled back to version {version}")
        return view if recipe is None else await self.set_recipe(policy, recipe)

    async def release(self, policy: str, version: int) -> TrainingView:
        self._changeable(policy)
        self._with_files(policy, version)
        step = self.ledger.steps.get((policy, version))
        if step is None or step.state is not StepState.REJECTED:
            problem = f"Version {version} of policy {policy!r} was not rejected."
            raise StateConflict(problem, code="version_not_rejected", field="version")
        self._unpinned(policy, version)
        if any(self.ledger.samples[one].state is not SampleState.QUARANTINED for one in step.samples):
            problem = f"The samples of version {version} of policy {policy!r} were taken again with --retry."
            raise StateConflict(problem, code="samples_retried", field="version")
        self._continue_from(policy, version, f"version {version} was released")
        self.ledger.end_as_trained(policy, version)
        return self.ledger.view(policy)

    def _unpinned(self, policy: str, version: int) -> None:
        pinned = self.ledger.policies[policy].pinned
        if pinned not in (None, version):
            problem = f"Version {pinned} is pinned, so {version} could not answer: unpin first."
            raise StateConflict(problem, code="version_pinned", field="version")

    def _accepted(self, policy: str, version: int) -> None:
        step = self.ledger.steps.get((policy, version))
        if step is not None and step.state is not StepState.COMMITTED:
            problem = f"Version {version} of policy {policy!r} is {step.state}: {step.reason}."
            raise StateConflict(problem, code="version_not_accepted", field="version")

    def _continue_from(self, policy: str, version: int, why: str) -> TrainingView:
        policy_row = self.ledger.policies[policy]
        policy_row.rejections = 0
        before, after = set(self.ledger.path(policy, policy_row.head)), set(self.ledger.path(policy, version))
        policy_row.head, policy_row.epoch = version, policy_row.epoch + 1
        if (opened := self.ledger.open_step(policy)) is not None:
            self.ledger.abandon(policy, opened, why)
        for n in before ^ after:
            step = self.ledger.steps.get((policy, n))
            made = None if step is None else step.trained
            for sample in self._trained_in(policy, n):
                found = self.ledger.samples[sample]
                found.why = trained_detail(n, None if made is None else made.figures.without_hint.get(sample))
                found.outcome = TurnOutcome.TRAINED
                if n in before:
                    found.outcome, found.why = TurnOutcome.ROLLED_BACK, f"{found.why}, rolled back to {version}"
        if self.ledger.is_served(policy, version):
            self.ledger.set_active(policy, version)
        return self.ledger.view(policy)

    async def pin(self, policy: str, version: int) -> TrainingView:
        policy_row = self._changeable(policy)
        self._with_files(policy, version)
        self._accepted(policy, version)
        policy_row.pinned = version
        if self.ledger.is_served(policy, version):
            self.ledger.set_active(policy, version)
        return self.ledger.view(policy)

    async def unpin(self, policy: str) -> TrainingView:
        policy_row = self._changeable(policy)
        if policy_row.pinned is not None:
            policy_row.pinned = None
            if self.ledger.is_served(policy, policy_row.head):
                self.ledger.set_active(policy, policy_row.head)
        return self.ledger.view(policy)

    async def recipe(self, policy: str) -> Recipe:
        if (recipe := self._require_policy(policy).recipe) is None:
            raise NotFound(f"policy {policy!r} has no recipe.", code="recipe_not_found", field="policy")
        return recipe

    async def set_recipe(self, policy: str, recipe: Recipe) -> TrainingView:
        policy_row = self._changeable(policy)
        policy_row.recipe, policy_row.rejections = recipe, 0
        self.ledger.expire_samples_of_other_signal(policy)
        self.ledger.refresh_work_flag(policy)
        return self.ledger.view(policy)

    def _changeable(self, policy: str) -> FakePolicy:
        found = self._require_policy(policy)
        if found.retired:
            raise StateConflict(f"The policy {policy!r} was retired.", code="policy_retired", field="policy")
        return found

    def _require_policy(self, policy: str) -> FakePolicy:
        try:
            return self.ledger.require_policy(policy)
        except RecordUnusable as error:
            raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy") from error

    def _with_files(self, policy: str, version: int) -> None:
        found = self.ledger.versions.get((policy, version))
        if found is None:
            raise NotFound(f"Policy {policy!r} has no version {version}.", code="version_not_found", field="version")
        if found.removed:
            problem = f"The files of version {version} of policy {policy!r} were removed."
            raise StateConflict(problem, code="version_removed", field="version")

    def _trained_in(self, policy: str, n: int) -> list[SampleId]:
        step = self.ledger.steps.get((policy, n))
        trained = SampleState.TRAINED
        return [] if step is None else [one for one in step.samples if self.ledger.samples[one].state is trained]

    def _view(self, policy: str, n: int, version: FakeVersion) -> VersionView:
        policy_row = self.ledger.policies[policy]
        path = self.ledger.path(policy, policy_row.head)
        step = self.ledger.steps.get((policy, n))
        state, reason = (None, None) if step is None else (step.state, step.reason)
        place = version_place(n, policy_row.head, path, state, reason)
        labels = ["active"] * (n == policy_row.active) + ["pinned"] * (n == policy_row.pinned) + [place]
        metrics: dict[str, JsonValue] | None = None
        if step is not None and step.trained is not None:
            metrics = metrics_of(step.trained)
        return VersionView(
            n=n,
            parent=version.parent,
            state=", ".join(labels + ["files removed"] * version.removed),
            active=n == policy_row.active,
            pinned=n == policy_row.pinned,
            engines=sorted(engine for engine, own, loaded in self.ledger.loaded if (own, loaded) == (policy, n)),
            metrics=metrics,
            created_at=version.made_at,
            gate=() if step is None else step.checks,
            gate_seconds=None if step is None else gate_seconds(step.checks),
            origin=version.origin,
        )
