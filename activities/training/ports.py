"""Ports of training.

Every method of a store is one transaction. It raises StoreUnavailable if PostgreSQL does not answer in time, and
RecordUnusable if the policy or step does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from clawloop.contracts.training import (
    Claim,
    StepBatch,
    StepState,
    TrainedStep,
    TrainingView,
    VersionRef,
)


class StepStore(Protocol):
    """Stores steps and their batches."""

    async def status(self, policy: str) -> TrainingView:
        """The status of the policy's training."""

    async def claim(self, policy: str, n: int) -> Claim:
        """Claim a batch for step `n`. Idempotent. Samples that cannot be trained expire, with a reason.

        No batch while the policy is paused, has no usable recipe, or too few samples wait; `policies.work_waiting` is
        then reset.
        """

    async def batch(self, policy: str, n: int) -> StepBatch:
        """The batch of a claimed step, without samples erased since; the same for every call. Counts an attempt.

        Raises:
            RecordUnusable: also if the step has ended, or its parent's files were removed.
        """

    async def commit(self, step: StepBatch, trained: TrainedStep) -> StepState:
        """Commit by compare-and-set: the step is abandoned if the policy's head or epoch is not the batch's.

        Idempotent for an adapter with the same hash; another adapter for a committed step returns abandoned.

        Raises:
            RecordUnusable: also if the trained version is not the one the step makes.
        """

    async def quarantine(self, policy: str, n: int, reason: str) -> None:
        """Quarantine a claimed step and its samples, and pause training; does nothing if the step has ended."""

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


class Trainer(Protocol):
    """Computes steps."""

    async def train(self, step: StepBatch, report: Callable[[str], None]) -> TrainedStep:
        """Compute a step and write its adapter to disk.

        Args:
            report: gets the current phase, for heartbeats; called often.

        Raises:
            StepDiverged, NothingToTrain, AdapterUnusable, ModelUnsupported, SampleUnusable: this batch can never be
                trained.
            RecipeRejected: no batch of this recipe can be trained on this base model.
            DiskFull: there is no room for the adapter.
            TrainerUnavailable: retry; e.g. a rank died.
        """


class WorkNotifier(Protocol):
    """Notifies policies' training workflows of a waiting batch."""

    async def notify_work(self, policy: str) -> None:
        """Signal the policy's workflow, and start it if it does not run. Idempotent.

        Raises:
            SignalFailed: the sweep retries.
        """


class WorkStore(Protocol):
    """Stores which training workflows need a signal that a batch waits."""

    async def pending_work(self, age: timedelta) -> list[str]:
        """Policies with a waiting batch whose workflow was not notified, or longer than `age` ago.

        While a step is claimed, 60 times `age`.
        """

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        """Record that the policies' workflows were notified now."""
