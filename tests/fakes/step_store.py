"""Steps in memory; tokens of turns are never damaged here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from clawloop.core.algorithms.rewards import is_stale, versions_apart
from clawloop.core.contracts.training import (
    Attempts,
    Claim,
    GateCheck,
    Pace,
    SampleState,
    StepBatch,
    StepRecord,
    StepState,
    TrainedStep,
    TrainingView,
    VersionRef,
    waiting_words,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Recipe
from db.training.samples import needs_version
from db.training.status import described
from db.training.steps import metrics_of, with_hints_lost
from tests.fakes.ledger import FakeLedger, FakePolicy, FakeSample, FakeStep, FakeVersion


class FakeStepStore:
    """Satisfies `activities.training.steps.StepStore`."""

    def __init__(self, ledger: FakeLedger) -> None:
        self.ledger = ledger

    async def status(self, policy: str) -> TrainingView:
        return self.ledger.view(policy)

    async def claim(self, policy: str, n: int) -> Claim:
        policy_row = self.ledger.require_policy(policy)
        known = self.ledger.steps.get((policy, n))
        if known is not None:
            return Claim(policy, n, known.state, len(known.samples), known.reason or f"{len(known.samples)} samples")
        if (other := self.ledger.open_step(policy)) is not None:
            return Claim(policy, n, None, 0, f"step {other} is {described(self.ledger.steps[policy, other].state)}")
        if n != (expected := self.ledger.next_step(policy)):
            return Claim(policy, n, None, 0, f"the next step is {expected}")
        recipe = policy_row.recipe
        fault = "the policy has no recipe" if recipe is None else None
        fault = fault if policy_row.paused is None else f"paused: {policy_row.paused}"
        if recipe is None or fault is not None:
            policy_row.work_waiting = False
            return Claim(policy, n, None, 0, fault or "")
        if (closed := self.ledger.closed(policy)) is not None:
            return Claim(policy, n, None, 0, closed.reason)
        return self._claim_new(policy_row, recipe, n)

    def _claim_new(self, policy_row: FakePolicy, recipe: Recipe, n: int) -> Claim:
        wanted = recipe.train.batch_samples
        usable: list[SampleId] = []
        for sample in self.ledger.fresh(policy_row.id):
            if len(usable) == wanted:
                break
            found = self.ledger.samples[sample]
            if (fault := self._fault(policy_row, recipe, found)) is None:
                usable.append(sample)
            else:
                found.end(SampleState.EXPIRED, TurnOutcome.EXPIRED, fault)
        oldest = self.ledger.samples[usable[0]].made_at if usable else self.ledger.now
        waited = self.ledger.now - oldest >= timedelta(hours=recipe.train.max_wait_hours)
        reason = f"{len(usable)} of {wanted} samples"
        if not usable or (len(usable) < wanted and not waited):
            policy_row.work_waiting = False
            return Claim(policy_row.id, n, None, 0, reason)
        for sample in usable:
            self.ledger.samples[sample].state = SampleState.CLAIMED
        step = FakeStep(policy_row.head, policy_row.epoch, recipe, usable)
        step.lr_scale = recipe.gate.lr_scale(policy_row.rejections)
        self.ledger.steps[policy_row.id, n] = step
        self.ledger.refresh_work_flag(policy_row.id)
        if len(usable) < wanted:
            reason += f"; the oldest waited {recipe.train.max_wait_hours:g} h"
        return Claim(policy_row.id, n, StepState.CLAIMED, len(usable), reason)

    def _fault(self, policy_row: FakePolicy, recipe: Recipe, sample: FakeSample) -> str | None:
        train = recipe.train
        parents = self.ledger.parents(policy_row.id)
        if sample.signal_hash != recipe.signal.hash:
            return "recipe changed"
        apart = versions_apart(sample.of.version, policy_row.head, parents)
        if is_stale(apart, bound=train.staleness_versions, explicit=sample.of.explicit):
            return f"stale: {apart} versions apart, bound {train.staleness_versions}"
        by_reward = bool(sample.of.reward) and train.uses_rewards
        if not by_reward and not (sample.of.hinted_prompts and train.uses_hints):
            return "neither a verdict nor a hint that this recipe learns from"
        gone = self._ref(policy_row.id, sample.of.version) is None
        if not by_reward and needs_version(train, sample.of.version, policy_row.head) and gone:
            return f"version {sample.of.version}, which answered, is gone: its hint cannot be read"
        return None

    def _ref(self, policy: str, n: int) -> VersionRef | None:
        version = self.ledger.versions.get((policy, n))
        return None if version is None or version.removed else version.ref

    async def record(self, policy: str, n: int) -> StepRecord | None:
        version, step = self.ledger.versions.get((policy, n)), self.ledger.steps.get((policy, n))
        if version is None or step is None:
            return None
        return StepRecord(policy, n, {} if step.trained is None else metrics_of(step.trained), version.made_at)

    async def begin_attempt(self, policy: str, n: int) -> Attempts:
        self.ledger.require_policy(policy)
        step = self._step(policy, n)
        if step.state is not StepState.CLAIMED:
            raise RecordUnusable(f"step {n} of policy {policy!r} is {step.state}")
        step.attempt += 1
        step.progress, step.pace, step.runs = None, None, True
        return Attempts(step.attempt, step.failed, step.interrupted)

    async def note_progress(self, policy: str, n: int, attempt: int, progress: str, pace: Pace | None = None) -> None:
        step = self.ledger.steps.get((policy, n))
        if step is not None and step.state is StepState.CLAIMED and step.attempt == attempt:
            step.progress, step.pace = progress, pace

    async def is_claimed(self, policy: str, n: int) -> bool:
        step = self.ledger.steps.get((policy, n))
        return step is not None and step.state is StepState.CLAIMED

    async def end_attempt(self, policy: str, n: int, attempt: int, *, failed: bool, why: str | None = None) -> Attempts:
        self.ledger.require_policy(policy)
        step = self._step(policy, n)
        if step.state is StepState.CLAIMED:
            step.failed += failed
            step.interrupted += not failed
            if step.attempt == attempt:
                step.progress, step.pace, step.runs = waiting_words(why), None, False
        return Attempts(step.attempt, step.failed, step.interrupted)

    async def batch(self, policy: str, n: int) -> StepBatch:
        self.ledger.require_policy(policy)
        step = self._step(policy, n)
        if step.state is not StepState.CLAIMED:
            raise RecordUnusable(f"step {n} of policy {policy!r} is {step.state}")
        samples = {sample: self.ledger.samples[sample].of for sample in step.samples}
        hinted = {sample.version for sample in samples.values() if sample.hinted_prompts}
        wanted = {n for n in hinted if needs_version(step.recipe.train, n, step.parent)}
        teachers = {n: ref for n in sorted(wanted) if (ref := self._ref(policy, n)) is not None}
        without_hint = {
            key: f"version {sample.version}, which answered, is gone"
            for key, sample in samples.items()
            if sample.hinted_prompts and sample.version in wanted - teachers.keys()
        }
        return StepBatch(
            policy=policy,
            base_model="tiny",
            n=n,
            parent=self._ref(policy, step.parent),
            epoch=step.epoch,
            recipe=step.recipe,
            samples=[
                replace(sample, hinted_prompts={}) if key in without_hint else sample for key, sample in samples.items()
            ],
            teachers=teachers,
            without_hint=without_hint,
            lr_scale=step.lr_scale,
        )

    async def commit(self, step: StepBatch, trained: TrainedStep, checks: Sequence[GateCheck] = ()) -> StepState:
        policy_row = self.ledger.require_policy(step.policy)
        parent = 0 if step.parent is None else step.parent.n
        version = trained.version
        if (version.policy, version.n, version.parent) != (step.policy, step.n, parent):
            raise RecordUnusable(
                f"{version.path} is not the version that step {step.n} of policy {step.policy!r} makes"
            )
        row = self._step(step.policy, step.n)
        if row.state in (StepState.CANDIDATE, StepState.COMMITTED, StepState.REJECTED):
            made = self._ref(step.policy, step.n)
            same = made is not None and made.sha256 == version.sha256
            return row.state if same else StepState.ABANDONED
        if row.state is not StepState.CLAIMED:
            return row.state
        if (policy_row.head, policy_row.epoch) != (parent, step.epoch):
            self.ledger.abandon(step.policy, step.n, f"the policy went on to version {policy_row.head}")
            return StepState.ABANDONED
        row.state, row.trained, row.checks = StepState.CANDIDATE, with_hints_lost(step, trained), list(checks)
        self.ledger.versions[step.policy, step.n] = FakeVersion(parent, version, self.ledger.now)
        return StepState.CANDIDATE

    async def expire(self, policy: str, n: int, reason: str) -> None:
        step = self._step(policy, n)
        if step.state is not StepState.CLAIMED:
            return
        step.state, step.reason = StepState.ABANDONED, reason
        for sample in step.samples:
            self.ledger.samples[sample].end(SampleState.EXPIRED, TurnOutcome.EXPIRED, f"step {n}: {reason}")
        self.ledger.refresh_work_flag(policy)

    async def quarantine(self, policy: str, n: int, reason: str) -> None:
        policy_row = self.ledger.require_policy(policy)
        step = self._step(policy, n)
        if step.state is not StepState.CLAIMED:
            return
        step.state, step.reason = StepState.QUARANTINED, reason
        policy_row.paused = f"step {n}: {reason}"
        for sample in step.samples:
            self.ledger.samples[sample].end(SampleState.QUARANTINED, TurnOutcome.QUARANTINED, f"step {n}: {reason}")
        self.ledger.refresh_work_flag(policy)

    async def set_aside(self, policy: str, n: int, reason: str) -> None:
        self.ledger.require_policy(policy)
        if self._step(policy, n).state is StepState.CLAIMED:
            self.ledger.set_aside(policy, n, StepState.QUARANTINED, reason)

    async def abandon(self, policy: str, n: int, reason: str) -> None:
        self.ledger.require_policy(policy)
        if self._step(policy, n).state is StepState.CLAIMED:
            self.ledger.abandon(policy, n, reason)

    async def abandon_and_pause(self, policy: str, n: int, reason: str) -> None:
        policy_row = self.ledger.require_policy(policy)
        step = self._step(policy, n)
        if step.state is StepState.CLAIMED:
            if policy_row.recipe == step.recipe:
                policy_row.paused = f"step {n}: {reason}"
            self.ledger.abandon(policy, n, reason)

    async def committed(self, policy: str, n: int) -> VersionRef | None:
        return self._made(policy, n, StepState.COMMITTED)

    async def candidate(self, policy: str, n: int) -> VersionRef | None:
        return self._made(policy, n, StepState.CANDIDATE)

    def _made(self, policy: str, n: int, state: StepState) -> VersionRef | None:
        step = self.ledger.steps.get((policy, n))
        return None if step is None or step.state is not state else self.ledger.versions[policy, n].ref

    def _step(self, policy: str, n: int) -> FakeStep:
        if (policy, n) not in self.ledger.steps:
            raise RecordUnusable(f"policy {policy!r} has no step {n}")
        return self.ledger.steps[policy, n]
