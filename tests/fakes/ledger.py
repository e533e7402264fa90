"""Policies, samples, steps and versions in memory, shared by the fake step, publishing and training stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from clawloop.core.algorithms.rewards import path_to_base
from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.training import (
    OPEN_STEPS,
    BatchSample,
    GateCheck,
    Pace,
    SampleState,
    StepProgress,
    StepState,
    TrainedStep,
    TrainingState,
    TrainingView,
    VersionOrigin,
    VersionRef,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import RecordUnusable, StoreUnavailable
from clawloop.core.ids import SampleId, new_sample_id
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.recipes.schedule import Closed, closed_by, day_begin
from db.training.status import after_rejections, open_step, waits_for
from db.training.steps import paused_by_rejections, trained_detail


@dataclass
class FakePolicy:
    id: str
    recipe: Recipe | None
    head: int = 0
    active: int = 0
    epoch: int = 0
    pinned: int | None = None
    paused: str | None = None
    work_waiting: bool = False
    rejections: int = 0
    retired: bool = False


@dataclass
class FakeSample:
    """
    Attributes:
        judgement_reason: reason of the judgement.
    """

    of: BatchSample
    policy: str
    signal_hash: str | None
    made_at: datetime
    judgement_reason: str = "verdict +1"
    state: SampleState = SampleState.FRESH
    outcome: TurnOutcome = TurnOutcome.SAMPLED
    why: str = "verdict +1"

    def end(self, state: SampleState, outcome: TurnOutcome, why: str) -> None:
        self.state, self.outcome, self.why = state, outcome, why


@dataclass
class FakeStep:
    parent: int
    epoch: int
    recipe: Recipe
    samples: list[SampleId]
    state: StepState = StepState.CLAIMED
    attempt: int = 0
    failed: int = 0
    interrupted: int = 0
    reason: str | None = None
    progress: str | None = None
    runs: bool = False
    pace: Pace | None = None
    trained: TrainedStep | None = None
    lr_scale: float = 1.0
    checks: list[GateCheck] = field(default_factory=list)


@dataclass
class FakeVersion:
    parent: int | None
    ref: VersionRef | None
    made_at: datetime
    retired_at: datetime | None = None
    removed: bool = False
    origin: VersionOrigin | None = None


@dataclass
class FakeLedger:
    """
    Attributes:
        now: the clock; move it forward to age everything.
        available: False makes every call raise StoreUnavailable.
    """

    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    available: bool = True
    policies: dict[str, FakePolicy] = field(default_factory=dict)
    samples: dict[SampleId, FakeSample] = field(default_factory=dict)
    steps: dict[tuple[str, int], FakeStep] = field(default_factory=dict)
    versions: dict[tuple[str, int], FakeVersion] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    loaded: dict[tuple[str, str, int], datetime] = field(default_factory=dict)
    waiting_turns: int = 0

    def add_policy(self, policy: str, recipe: Recipe | None) -> FakePolicy:
        self.versions[policy, 0] = FakeVersion(None, None, self.now)
        self.policies[policy] = FakePolicy(policy, recipe)
        return self.policies[policy]

    def add_sample(
        self,
        policy: str,
        *,
        version: int = 0,
        reward: float | None = 1.0,
        hinted_prompts: Mapping[int, Sequence[int]] | None = None,
        explicit: bool = False,
    ) -> SampleId:
        """A fresh sample, as finalizing a judgement makes it."""
        recipe = self.require_policy(policy).recipe
        sample = BatchSample(
            sample_id=new_sample_id(),
            prompt_ids=[1, 2, 3],
            response_ids=[4, 5],
            logprobs=[-0.5, -0.25],
            temperature=0.6,
            version=version,
            reward=reward,
            hinted_prompts=hinted_prompts or {},
            explicit=explicit,
        )
        signal = None if recipe is None else recipe.signal.hash
        self.samples[sample.sample_id] = FakeSample(sample, policy, signal, self.now)
        self.refresh_work_flag(policy)
        return sample.sample_id

    def require_policy(self, policy: str) -> FakePolicy:
        if not self.available:
            raise StoreUnavailable("the fake store is unavailable")
        if policy not in self.policies:
            raise RecordUnusable(f"there is no policy {policy!r}")
        return self.policies[policy]

    def fresh(self, policy: str) -> list[SampleId]:
        own = [key for key, one in self.samples.items() if one.policy == policy and one.state is SampleState.FRESH]
        return sorted(own)

    def refresh_work_flag(self, policy: str) -> bool:
        policy_row = self.require_policy(policy)
        fresh = self.fresh(policy)
        ready = False
        if policy_row.recipe is not None and policy_row.paused is None and fresh:
            train = policy_row.recipe.train
            waited = self.now - self.samples[fresh[0]].made_at
            ready = len(fresh) >= train.batch_samples or waited > timedelta(hours=train.max_wait_hours)
        raised = ready and not policy_row.work_waiting
        policy_row.work_waiting = ready
        return raised

    def parents(self, policy: str) -> dict[int, int]:
        return {
            n: version.parent
            for (name, n), version in self.versions.items()
            if name == policy and version.parent is not None
        }

    def path(self, policy: str, n: int) -> list[int]:
        return path_to_base(n, self.parents(policy))

    def open_step(self, policy: str) -> int | None:
        found = [n for (name, n), step in self.steps.items() if name == policy and step.state in OPEN_STEPS]
        return found[0] if found else None

    def set_aside(self, policy: str, n: int, state: StepState, reason: str) -> None:
        """End a step whose samples are at fault; the policy pauses after several in a row."""
        policy_row, step = self.policies[policy], self.steps[policy, n]
        step.state, step.reason = state, reason
        for sample in step.samples:
            self.samples[sample].end(SampleState.QUARANTINED, TurnOutcome.QUARANTINED, f"step {n}: {reason}")
        policy_row.rejections += 1
        if policy_row.rejections >= step.recipe.gate.pause_after:
            policy_row.paused = paused_by_rejections(policy_row.rejections, n, reason)
        self.refresh_work_flag(policy)

    def end_as_trained(self, policy: str, n: int) -> None:
        """Commit a step that has a version."""
        step = self.steps[policy, n]
        assert step.trained is not None
        step.state, step.reason = StepState.COMMITTED, None
        figures = step.trained.figures
        for sample in step.samples:
            dropped = figures.dropped.get(sample)
            if dropped is None:
                detail = trained_detail(n, figures.without_hint.get(sample))
                self.samples[sample].end(SampleState.TRAINED, TurnOutcome.TRAINED, detail)
            else:
                why = f"left out of step {n}: {dropped}"
                self.samples[sample].end(SampleState.EXPIRED, TurnOutcome.EXPIRED, why)

    def next_step(self, policy: str) -> int:
        return max(n for name, n in [*self.steps, *self.versions] if name == policy) + 1

    def abandon(self, policy: str, n: int, reason: str) -> None:
        step = self.steps[policy, n]
        step.state, step.reason = StepState.ABANDONED, reason
        for sample in step.samples:
            found = self.samples[sample]
            found.end(SampleState.FRESH, TurnOutcome.SAMPLED, found.judgement_reason)
        self.expire_samples_of_other_signal(policy)
        self.refresh_work_flag(policy)

    def expire_samples_of_other_signal(self, policy: str) -> None:
        recipe = self.require_policy(policy).recipe
        for sample in self.fresh(policy):
            if recipe is not None and (found := self.samples[sample]).signal_hash != recipe.signal.hash:
                found.end(SampleState.EXPIRED, TurnOutcome.EXPIRED, "recipe changed")

    def is_served(self, policy: str, n: int) -> bool:
        return n == 0 or any(
            not engine.draining and (engine.id, policy, n) in self.loaded for engine in self.engines.values()
        )

    def set_active(self, policy: str, n: int) -> None:
        policy_row = self.policies[policy]
        if policy_row.active == n:
            return
        self.versions[policy, policy_row.active].retired_at = self.now
        self.versions[policy, n].retired_at = None
        policy_row.active = n

    def view(self, policy: str) -> TrainingView:
        policy_row = self.require_policy(policy)
        signal = None if policy_row.recipe is None else policy_row.recipe.signal.hash
        opened = self.open_step(policy)
        fresh = [one for one in self.fresh(policy) if self.samples[one].signal_hash == signal]
        needed = 0 if policy_row.recipe is None else policy_row.recipe.train.batch_samples
        waits = (
            "the policy has no recipe"
            if policy_row.recipe is None
            else waits_for(len(fresh), needed, self.waiting_turns)
            + after_rejections(policy_row.rejections, policy_row.recipe.gate)
        )
        closed = self.closed(policy)
        state, reason = TrainingState.WAITING, waits if closed is None else f"{closed.reason}; {waits}"
        if opened is not None:
            step = self.steps[policy, opened]
            state, reason = TrainingState.TRAINING, open_step(opened, step.state, step.attempt)
        if policy_row.paused is not None:
            under_way = f"; {reason}" if opened is not None else ""
            state, reason = TrainingState.PAUSED, f"paused: {policy_row.paused}{under_way}"
        oldest = (self.now - self.samples[fresh[0]].made_at).total_seconds() if fresh else None
        return TrainingView(
            policy=policy,
            pool="default",
            state=state,
            reason=reason,
            ready=len(fresh),
            needed=needed,
            judging=self.waiting_turns,
            oldest_seconds=oldest,
            step=opened or self.next_step(policy),
            step_state=None if opened is None else self.steps[policy, opened].state,
            head=policy_row.head,
            version=policy_row.active,
            epoch=policy_row.epoch,
            pinned=policy_row.pinned,
            unpublished=policy_row.active != (policy_row.head if policy_row.pinned is None else policy_row.pinned),
            max_wait_seconds=None if policy_row.recipe is None else 3600 * policy_row.recipe.train.max_wait_hours,
            closed_seconds=None if closed is None else closed.seconds,
            probed=False,
            general_unasked=False,
            canary=None,
            canary_parent=None,
            progress=self._progress(policy_row, opened),
        )

    def _progress(self, policy: FakePolicy, opened: int | None) -> StepProgress | None:
        target = policy.head if policy.pinned is None else policy.pinned
        if opened is None:
            return None if policy.active == target else StepProgress(f"publishing version {target}")
        step = self.steps[policy.id, opened]
        if step.state is StepState.CANDIDATE:
            return StepProgress(f"checking version {opened} at the gate")
        waits = "beginning" if step.attempt else "waiting for the trainer"
        pace = (None, None) if step.pace is None else (step.pace.tokens_a_second, step.pace.seconds_left)
        return StepProgress(step.progress or waits, 0.0 if step.runs else None, *pace)

    def closed(self, policy: str) -> Closed | None:
        """Why the policy's schedule lets no batch be claimed; no chat is slow here."""
        recipe = self.require_policy(policy).recipe
        schedule = None if recipe is None else recipe.train.schedule
        if schedule is None:
            return None
        since = day_begin(schedule, self.now)
        made = [n for (of, n), version in self.versions.items() if of == policy and n and version.made_at >= since]
        return closed_by(schedule, self.now, len(made), None)
