"""Ports of training.

Every method of a store is one transaction. It raises StoreUnavailable if PostgreSQL does not answer in time, and
RecordUnusable if the policy or step does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from clawloop.contracts.attempts import Attempts
from clawloop.contracts.gate_checks import GateCheck
from clawloop.contracts.probes import ProbeAnswer, ProbeContent, ProbePlan
from clawloop.contracts.progress import Pace, StatusCallback
from clawloop.contracts.step_record import StepRecord
from clawloop.contracts.training import Claim, StepBatch, StepState, TrainedStep, TrainingView, VersionRef
from clawloop.gate.canary import CanaryDecision


class StepStore(Protocol):
    """Stores steps and their batches."""

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
        """What is stored of a step that made a version, whatever became of it; None if it made none."""


class RunLog(Protocol):
    """Keeps the figures of steps for a program that people compare runs with."""

    def write(self, step: StepRecord) -> None:
        """Note a step; the same step again changes nothing.

        Raises:
            OSError
        """


class GateStore(Protocol):
    """Decides about candidates. Every method raises RecordUnusable if there is no such step."""

    async def checks(self, policy: str, n: int) -> list[GateCheck]:
        """What the gate's checks found about a version."""

    async def record(self, policy: str, n: int, check: GateCheck) -> None:
        """Store a check of a candidate; the first one of its name counts. Nothing once it is decided."""

    async def accept(self, policy: str, n: int) -> tuple[StepState, str]:
        """Make a candidate the policy's head, by compare-and-set on its parent and epoch.

        Returns the step's state afterwards, and its reason: abandoned if the policy has moved on, and what was decided
        before if the step is no candidate any more.
        """

    async def reject(self, policy: str, n: int, reason: str) -> tuple[StepState, str]:
        """Reject a candidate and set its samples aside; training pauses after several in a row.

        Returns the step's state afterwards, and its reason: what was decided before if the step is no candidate any
        more.
        """


class CanaryStore(Protocol):
    """Stores which versions are canaries."""

    async def open(self) -> list[str]:
        """The policies whose head is a canary that conversations get: without those that are pinned."""

    async def decide(self, policy: str) -> CanaryDecision | None:
        """End the policy's canary if verdicts or time decide: worse is rolled back, else all conversations get it.

        A worse one counts as a step without an accepted version. None if there is no canary, it goes on, or a
        version is pinned.
        """


class ProbeStore(Protocol):
    """Stores what probes are asked of candidates, and what they found."""

    async def plan(self, policy: str, n: int) -> ProbePlan | None:
        """What to ask of a version; None if it is no candidate, or was asked already. The same for every call."""

    async def record(self, policy: str, n: int, check: GateCheck) -> None:
        """Store the check of a candidate; the first one counts. Nothing once it is decided."""


class ProbeEngines(Protocol):
    async def answer(self, policy: str, version: int, content: ProbeContent, max_tokens: int) -> ProbeAnswer:
        """A version's answer to a probe.

        Raises:
            EngineUnavailable: no engine has the version, or it did not answer; retry.
            EngineRejected: the engine will never take this probe.
        """


class Trainer(Protocol):
    """Computes steps."""

    async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        """Compute a step and write its adapter to disk.

        Args:
            report: gets the current phase, for heartbeats.

        Raises:
            StepDiverged, NothingToTrain, AdapterUnusable, SampleUnusable: this batch can never be trained.
            AdapterUnreadable: as long as the disk is away.
            ModelUnsupported: no batch can be trained on the model that this trainer has.
            RecipeRejected: no batch of this recipe can be trained on this base model.
            DiskFull: there is no room for the adapter.
            StepTooLarge: memory ended five attempts at it.
            TrainerFailed: retry four times; e.g. out of memory, or a rank died.
            TrainerUnavailable: retry.
        """


class WorkStore(Protocol):
    """Stores which training workflows need a signal that a batch waits."""

    async def pending_work(self, age: timedelta) -> list[str]:
        """Policies with a waiting batch whose workflow was not notified, or longer than `age` ago.

        While a step is claimed, 60 times `age`. Also, after 10 times `age`, those whose active version is not the one
        that should answer.
        """

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        """Record that the policies' workflows were notified now."""
