"""What training and publishing need from outside, as they would like to be told it.

Knows nothing about who answers. Every store call raises StoreUnavailable when PostgreSQL does not answer in time,
and RecordUnusable when what it is asked about does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from clawloop.contracts.serving import Engine
from clawloop.contracts.training import (
    AdapterDirectory,
    Claim,
    StepBatch,
    StepState,
    TrainedStep,
    TrainingView,
    VersionRef,
)


class StepStore(Protocol):
    """The ledger of steps."""

    async def look(self, policy: str) -> TrainingView: ...

    async def claim(self, policy: str, n: int) -> Claim:
        """A batch for step `n`, once: asked again, the same batch. Expires what is too old, with a reason.

        No batch while the policy is paused or too few samples wait; then `policies.work_waiting` is false again.
        """

    async def batch(self, policy: str, n: int) -> StepBatch:
        """What a claimed step takes; the same whenever it is asked for."""

    async def commit(self, step: StepBatch, trained: TrainedStep) -> StepState:
        """By compare-and-set: committed if the policy's head and epoch are the batch's, else abandoned.

        Twice is once: a step that is committed with this hash stays it.
        """

    async def quarantine(self, policy: str, n: int, reason: str) -> None:
        """Set the step's samples aside and pause training, in one transaction; twice is once."""

    async def abandon(self, policy: str, n: int, reason: str) -> None:
        """Give a claimed step up; its samples are free again."""

    async def hand_back(self, policy: str, n: int, reason: str) -> None:
        """The same, and pause training with the reason: the samples are good, the recipe is not. Twice is once.

        No pause where the policy has another recipe by now.
        """

    async def expire(self, policy: str, n: int, reason: str) -> None:
        """Give a claimed step up that teaches nothing; its samples expire with the reason. Twice is once."""

    async def committed(self, policy: str, n: int) -> VersionRef | None:
        """The version step `n` made; None if it is not committed."""


class Trainer(Protocol):
    """Where steps are computed."""

    async def train(self, step: StepBatch, report: Callable[[str], None]) -> TrainedStep:
        """One step, to an adapter on disk. `report` is told what it is at, for heartbeats; it may be called often.

        Raises:
            StepDiverged, NothingToTrain, AdapterUnusable, ModelUnsupported, SampleUnusable: it will never work.
            RecipeRejected: nor will any other batch of this recipe on this base model.
            TrainerUnavailable: ask again; e.g. one of its ranks died.
        """


class PublishingStore(Protocol):
    """Which versions engines should have, have, and which one answers."""

    async def engines(self) -> list[Engine]: ...

    async def wanted(self, engine_id: str) -> list[VersionRef]:
        """Versions this engine should have: of each policy head, active and pinned ones, oldest first."""

    async def loaded(self, engine_id: str, policy: str, n: int) -> None: ...

    async def unloaded(self, engine_id: str, policy: str, n: int) -> None: ...

    async def forget(self, engine_id: str) -> None:
        """It has lost all it had loaded: nothing is routed there but the base."""

    async def report(self, engine_id: str, problem: str | None) -> None:
        """Why the engine is out of rotation; None: it works."""

    async def activate(self, policy: str, n: int, epoch: int) -> bool:
        """Let version `n` answer from now on and tell gateways; forward only within an epoch, not while another is
        pinned, and only if an engine has it. False if something of this does not hold (any more)."""

    async def unloadable(self, engine_id: str, age: timedelta) -> list[VersionRef]:
        """Loaded versions that are neither wanted nor were active within `age`."""

    async def removable(self, age: timedelta) -> list[VersionRef]:
        """Versions whose files nobody needs: older than `age`, on no engine, and no step may begin from them."""

    async def mark_removed(self, policy: str, n: int, age: timedelta) -> bool:
        """Note that a version's files are gone, unless it is not removable any more: then False."""

    async def leftover(self, directories: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
        """Those that no version has and none will have: their step is over, and another attempt was committed or none.
        One whose step nobody knows is somebody else's, and stays."""


class AdapterFiles(Protocol):
    async def are_here(self) -> bool:
        """Whether this machine has the folder."""

    async def directories(self) -> list[AdapterDirectory]:
        """The finished ones there are here, whoever has them, and those whose removal was cut short."""

    async def remove(self, path: str) -> bool:
        """Delete a version's directory; one that is gone is no error. False if it cannot be told here.

        Args:
            path: as in `VersionRef`.

        Raises:
            AdapterUnusable: it cannot be deleted.
        """


class EngineControl(Protocol):
    """One vLLM, as its agent holds it. Every call raises EngineUnavailable when it does not answer."""

    async def load(self, version: VersionRef, name: str) -> None:
        """Load it under `name`, and see that it answers one token.

        Raises:
            EngineRejected: it cannot be loaded; AdapterUnusable: the files are not what the ledger says.
        """

    async def unload(self, name: str) -> None: ...

    async def names(self) -> frozenset[str]:
        """The adapters it has."""

    async def running(self) -> frozenset[str]:
        """The adapters that have requests, running or waiting."""

    async def slots(self) -> int:
        """How many adapters may have requests running at once; one more waits."""

    async def healthy(self) -> bool:
        """Whether it answers. Raises EngineUnavailable only when it is silent, which a busy engine may be."""


class PublishNotifier(Protocol):
    """What tells engines' workflows that there is a version to load."""

    async def publish(self, engine_ids: Sequence[str]) -> None:
        """Wake them; twice is once.

        Raises:
            SignalFailed
        """


class EngineWorkflows(Protocol):
    """The workflows of engines, by the engines' ids."""

    async def running(self) -> frozenset[str]:
        """Engines that have one, as far as Temporal has it indexed, which is seconds behind at most.

        Raises:
            SignalFailed
        """

    async def begin(self, engine_id: str) -> None:
        """See that it runs; twice is once.

        Raises:
            SignalFailed
        """

    async def end(self, engine_id: str) -> None:
        """Have it complete; nothing if it does not run.

        Raises:
            SignalFailed
        """


class WorkNotifier(Protocol):
    """What tells policies' training workflows that a batch waits."""

    async def notify_work(self, policy: str) -> None:
        """Tell the workflow, and begin it if it does not run. Twice is once.

        Raises:
            SignalFailed: the sweep will tell it.
        """


class WorkStore(Protocol):
    """Which policies' training workflows have to be told that work waits."""

    async def pending_work(self, age: timedelta) -> list[str]:
        """Policies with work whose workflow was never told of it, or longer than `age` ago."""

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        """Note that their workflows were told now."""
