"""The ledger of steps, for the training workflow. Each activity is one idempotent call of the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from temporalio import activity

from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.training import (
    Attempts,
    Claim,
    GateCheck,
    Pace,
    StepBatch,
    StepRecord,
    StepState,
    TrainedStep,
    TrainingView,
    VersionRef,
)
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.heartbeat import heartbeating

REASON_LIMIT = 200  # characters of a reason that cross Temporal; PostgreSQL holds all of it


class StepStore(Protocol):
    """Stores steps and their batches.

    Every method is one transaction. It raises StoreUnavailable if PostgreSQL does not answer in time, and
    RecordUnusable if the policy or step does not exist.
    """

    async def status(self, policy: str) -> TrainingView:
        """The status of the policy's training."""

    async def claim(self, policy: str, n: int) -> Claim:
        """Claim a batch for step `n`. Idempotent. Samples that cannot be trained expire, with a reason.

        No batch while the policy is paused, has no usable recipe, or too few samples wait; `policies.work_waiting` is
        then reset.
        """

    async def begin_attempt(self, policy: str, n: int) -> Attempts:
        """Count an attempt at a claimed step, which begins now; its number is `begun`.

        Raises:
            RecordUnusable: also if the step has ended.
        """

    async def end_attempt(self, policy: str, n: int, attempt: int, *, failed: bool, why: str | None = None) -> Attempts:
        """Note that an attempt ended without deciding the step; does nothing if the step has ended.

        Args:
            attempt: its number. If a later one has begun, it is only counted: the status is that of the later one.
            failed: the trainer cannot compute this step; else something interrupted it.
            why: for people, who see it until the next attempt begins; None: nothing that they could mend.
        """

    async def note_progress(self, policy: str, n: int, attempt: int, progress: str, pace: Pace | None = None) -> None:
        """Note what an attempt does, for people; does nothing unless the step is claimed and no later one has begun."""

    async def is_claimed(self, policy: str, n: int) -> bool:
        """True if the step is claimed: it has no version and has not ended."""

    async def batch(self, policy: str, n: int) -> StepBatch:
        """The batch of a claimed step, without samples erased since; the same for every call.

        Raises:
            RecordUnusable: also if the step has ended, or its parent's files were removed.
        """

    async def commit(self, step: StepBatch, trained: TrainedStep, checks: Sequence[GateCheck] = ()) -> StepState:
        """Make the version a candidate; abandon the step if the policy's head or epoch is not the batch's.

        Idempotent for an adapter with the same hash, also once it was decided; another adapter returns abandoned.

        Args:
            checks: what the gate's checks found about it so far.

        Raises:
            RecordUnusable: also if the trained version is not the one the step makes.
        """

    async def quarantine(self, policy: str, n: int, reason: str) -> None:
        """Quarantine a claimed step and its samples, and pause training; does nothing if the step has ended.

        For what would make the next step fail as well.
        """

    async def set_aside(self, policy: str, n: int, reason: str) -> None:
        """Quarantine a claimed step and its samples; training goes on, or pauses if it is one of several in a row.

        For a batch that is at fault itself. Does nothing if the step has ended.
        """

    async def abandon(self, policy: str, n: int, reason: str) -> None:
        """Abandon a claimed step; its samples are fresh again. Does nothing if the step has ended."""

    async def abandon_and_pause(self, policy: str, n: int, reason: str) -> None:
        """Abandon a claimed step whose batch is good, and pause training; does nothing if the step has ended.

        Training is not paused if the policy has another recipe by now.
        """

    async def expire(self, policy: str, n: int, reason: str) -> None:
        """Abandon a claimed step without anything to learn; its samples expire. Does nothing if the step has ended."""

    async def committed(self, policy: str, n: int) -> VersionRef | None:
        """The version that step `n` made; None if the step is not committed."""

    async def candidate(self, policy: str, n: int) -> VersionRef | None:
        """The version that step `n` made; None if the step is not a candidate."""

    async def record(self, policy: str, n: int) -> StepRecord | None:
        """Return the stored step that made a version, whatever became of the version; None if the step made none."""


class ClaimBatch(Message):
    """Ask for the batch of step `n`; the same batch each time."""

    policy: str
    n: int


class QuarantineStep(Message):
    """Quarantine the step's samples and pause training."""

    policy: str
    n: int
    reason: str


class AbandonStep(Message):
    """Give up a claimed step; its samples are fresh again."""

    policy: str
    n: int
    reason: str


class StepActivities:
    """Activities that claim and end steps in PostgreSQL; on the queue `ledger`, two also where workflows run. Short."""

    def __init__(self, store: StepStore) -> None:
        self._store = store

    @property
    def where_workflows_run(self) -> list[Callable[..., Awaitable[object]]]:
        """Activities that `call_ledger` of the workflows calls: for the workers of the workflows and of the queue."""
        return [self.read_training_status, self.claim_batch]

    @activity.defn
    async def read_training_status(self, policy: str) -> TrainingView:
        """The policy's training state now."""
        async with heartbeating():
            view = await self._store.status(policy)
        return replace(view, reason=view.reason[:REASON_LIMIT])

    @activity.defn
    async def claim_batch(self, request: ClaimBatch) -> Claim:
        """The batch of a step; the same batch on each call."""
        async with heartbeating():
            claim = await self._store.claim(request.policy, request.n)
        if claim.state is StepState.CLAIMED:
            crash_point(CrashPoint.CLAIMED)
        return replace(claim, reason=claim.reason[:REASON_LIMIT])

    @activity.defn
    async def quarantine_step(self, request: QuarantineStep) -> None:
        """Quarantine a step's samples and pause training."""
        async with heartbeating():
            await self._store.quarantine(request.policy, request.n, request.reason)

    @activity.defn
    async def abandon_step(self, request: AbandonStep) -> None:
        """Give up a claimed step."""
        async with heartbeating():
            await self._store.abandon(request.policy, request.n, request.reason)
