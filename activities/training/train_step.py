"""A training step: its batch, its adapter, its version, which is a candidate until the gate has decided.

A step that has made its version is never trained again. A step that cannot succeed is quarantined, given up or expired
here, with the reason, so that a worker that dies right after leaves nothing half decided.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Protocol

from temporalio import activity

from activities.training.steps import REASON_LIMIT, StepStore
from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.training import (
    Attempts,
    Pace,
    StatusCallback,
    StepBatch,
    StepRecord,
    StepState,
    TrainedStep,
    VersionRef,
)
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import (
    AdapterUnreadable,
    DiskFull,
    EncryptionKeyMissing,
    ModelUnsupported,
    NothingToTrain,
    PermanentError,
    RecipeRejected,
    RecordUnusable,
    StepDiverged,
    StepTooLarge,
    StoreUnavailable,
    TrainerFailed,
    TrainerUnavailable,
    TransientError,
)
from clawloop.core.gate.gate import BY_TRAINER, ComputedStep, found
from clawloop.core.heartbeat import heartbeating

log = logging.getLogger(__name__)

# A trainer that fails at a step so often will fail at it again: no memory, a broken GPU.
FAILED_ATTEMPTS = 5
# The kernel kills a process that has no memory left, and the next attempt likewise; it may choose another process than
# the trainer, so this must end. A deploy or a lost power supply does not hit the same step that often.
LOST_ATTEMPTS = 10

# The page looks for changes every second; each note is a new version of a row.
NOTE_SECONDS = 2.0

# A line of the log for each stage; a stage of hours has some more.
LOG_SECONDS = 60.0


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


class TrainStep(Message):
    """Compute and commit the claimed step `n`; a step that is committed already is not trained again."""

    policy: str
    n: int


class StepDone(Message):
    """The result of a step. Figures that are not known are None.

    Args:
        state: candidate: its version waits for the gate; committed: it was accepted before; abandoned: it ended
            without a version; quarantined: it cannot succeed, for `reason`, and the workflow calls `quarantine_step`;
            rejected: by the gate.
        parent: the version it started from.
        kl: None if the recipe measures none.
        reason: empty for a candidate and for a committed step.
        gate: what the checks of the gate found, in one line.
    """

    policy: str
    n: int
    state: StepState
    parent: int | None = None
    path: str | None = None
    sha256: str | None = None
    samples: int | None = None
    tokens: int | None = None
    loss: float | None = None
    kl: float | None = None
    ratio: float | None = None
    seconds: float | None = None
    reason: str = ""
    gate: str = ""


class TrainingActivities:
    """Activities that compute steps; on the queue `trainer-{pool}`, one at a time.

    Args:
        run_log: notes the figures of each step that made a version, for a program that people compare runs with; the
            same step again changes nothing. Raises OSError. None: no log is written.
    """

    def __init__(
        self,
        steps: StepStore,
        trainer: Trainer,
        note_seconds: float = NOTE_SECONDS,
        run_log: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._steps = steps
        self._trainer = trainer
        self._note_seconds = note_seconds
        self._run_log = run_log

    @activity.defn
    async def train_step(self, request: TrainStep) -> StepDone:
        """Compute a claimed step, and make its version a candidate.

        A sample that cannot be trained is left out, and the commit records it. A step that diverges is set aside, and
        training goes on with other samples. A step whose adapter or model cannot be used is quarantined and training
        pauses. A batch without anything to learn expires. Where the recipe does not fit the model, or the disk
        is full, training pauses too, and the samples are fresh again.
        """
        progress = _Progress()
        async with heartbeating(lambda: progress.now[0]):
            if (made := await self._find_made(request)) is not None:
                return made
            done = await self._compute(request, progress)
            if done.path is None:
                # An earlier attempt, which Temporal gave up and which still reaches PostgreSQL, may have made the
                # version meanwhile. The workflow would take the step for ended, and the gate would not decide about it.
                return await self._find_made(request) or done
            return done

    async def _find_made(self, request: TrainStep) -> StepDone | None:
        """The version that an attempt at the step has made; None if there is none, or the gate rejected it."""
        # In the order of its states: the gate may decide between the two reads.
        if (version := await self._steps.candidate(request.policy, request.n)) is not None:
            state = StepState.CANDIDATE
        elif (version := await self._steps.committed(request.policy, request.n)) is not None:
            state = StepState.COMMITTED
        else:
            return None
        await self._log_run(request)
        return _made(version, state)

    async def _compute(self, request: TrainStep, progress: _Progress) -> StepDone:
        try:
            attempts = await self._steps.begin_attempt(request.policy, request.n)
            if attempts.lost >= LOST_ATTEMPTS:
                return await self._pause(request, _lost(attempts))
            batch = await self._read_batch(request, attempts.begun)
        except RecordUnusable as error:
            # An earlier attempt ended the step (then `quarantine` does nothing), or its parent's files are gone (then
            # no trainer can compute it). `claim` returns the state the step has now.
            await self._steps.quarantine(request.policy, request.n, str(error))
            claim = await self._steps.claim(request.policy, request.n)
            return _ended(request, claim.state or StepState.ABANDONED, claim.reason)
        return await self._attempt(request, attempts.begun, batch, progress)

    async def _read_batch(self, request: TrainStep, attempt: int) -> StepBatch:
        try:
            return await self._steps.batch(request.policy, request.n)
        except EncryptionKeyMissing:  # the attempt is not the trainer's
            await self._steps.end_attempt(request.policy, request.n, attempt, failed=False)
            raise

    @asynccontextmanager
    async def _noting(self, request: TrainStep, attempt: int, progress: _Progress) -> AsyncIterator[None]:
        """Write to the ledger and to the log what the step does, while the block runs; best effort."""
        ended = asyncio.Event()

        async def note() -> None:
            noted: tuple[str, Pace | None] = ("", None)
            logged, logged_at = "", -math.inf
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), self._note_seconds)
                if ended.is_set() or (now := progress.now) == noted:
                    continue
                words, pace = _without_number(now[0]), now[1]
                if (stage := words.partition(", micro-batch")[0]) != logged or time.monotonic() > (
                    logged_at + LOG_SECONDS
                ):
                    _log_progress(request, words, pace)
                    logged, logged_at = stage, time.monotonic()
                with suppress(StoreUnavailable):
                    await self._steps.note_progress(request.policy, request.n, attempt, words, pace)
                    noted = now

        noting = asyncio.create_task(note())
        try:
            yield
        finally:
            ended.set()
            await noting

    async def _attempt(self, request: TrainStep, attempt: int, batch: StepBatch, progress: _Progress) -> StepDone:
        try:
            async with self._noting(request, attempt, progress):  # ends first: a note would overwrite the last words
                return await self._train(request, batch, progress)
        except TrainerFailed as error:
            attempts = await self._steps.end_attempt(request.policy, request.n, attempt, failed=True, why=str(error))
            if attempts.failed < FAILED_ATTEMPTS:
                raise
            return await self._pause(request, f"{error} (failed {attempts.failed} times)")
        except (TransientError, asyncio.CancelledError) as error:
            # A disk may be gone for days: the status says for what the step waits.
            why = str(error) if isinstance(error, TrainerUnavailable | AdapterUnreadable) else None
            with suppress(StoreUnavailable):  # then it counts as lost
                await self._steps.end_attempt(request.policy, request.n, attempt, failed=False, why=why)
            raise

    async def _train(self, request: TrainStep, batch: StepBatch, report: StatusCallback) -> StepDone:
        try:
            trained = await self._train_unless_ended(request, batch, report)
        except NothingToTrain as error:
            reason = str(error)
            await self._steps.expire(request.policy, request.n, reason)
            log.warning(
                "step expired: nothing to learn", extra={"policy": request.policy, "step": request.n, "why": reason}
            )
            return _ended(request, StepState.ABANDONED, reason)
        except (RecipeRejected, DiskFull, ModelUnsupported, StepTooLarge) as error:
            return await self._pause(request, str(error))
        except PermanentError as error:
            # The step diverged, or its adapter is unusable: numbers and paths, nothing of a conversation.
            reason = str(error)
            if isinstance(error, StepDiverged):
                await self._steps.set_aside(request.policy, request.n, reason)
            else:
                await self._steps.quarantine(request.policy, request.n, reason)
            log.warning("step quarantined", extra={"policy": request.policy, "step": request.n, "why": reason})
            return _ended(request, StepState.QUARANTINED, reason)
        if trained is None:
            claim = await self._steps.claim(request.policy, request.n)
            log.info("step stopped: it had ended", extra={"policy": request.policy, "step": request.n})
            return _ended(request, claim.state or StepState.ABANDONED, claim.reason)
        report(f"step {request.n}: committing")
        checks = found(BY_TRAINER, ComputedStep(batch, trained), batch.recipe.gate)
        crash_point(CrashPoint.SAVED_NOT_COMMITTED)
        state = await self._steps.commit(batch, trained, checks)
        crash_point(CrashPoint.COMMITTED)
        log.info("step done", extra={"policy": request.policy, "step": request.n, "state": state})
        if state not in (StepState.CANDIDATE, StepState.COMMITTED):
            return _ended(
                request,
                state,
                "another version was committed, the policy was rolled back, or the gate rejected the version of another"
                " attempt, before this step committed",
            )
        await self._log_run(request)
        return _made(trained.version, state, trained)

    async def _train_unless_ended(
        self, request: TrainStep, batch: StepBatch, report: StatusCallback
    ) -> TrainedStep | None:
        """The trained step; None if something, such as a roll-back, ended the step first, and the trainer stopped."""
        training = asyncio.ensure_future(self._trainer.train(batch, report))
        ended = asyncio.create_task(self._wait_for_end(request))
        try:
            await asyncio.wait({training, ended}, return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                return training.result()
            ended.result()
            return None
        finally:
            ended.cancel()
            training.cancel()  # the trainer takes no other step before it has stopped
            await asyncio.wait({training, ended})
            if not training.cancelled():
                training.exception()  # retrieved, so that asyncio does not log it: stopped, it may end with an error

    async def _wait_for_end(self, request: TrainStep) -> None:
        """Return once the step is not claimed any more; the ledger alone tells, as operators write there first."""
        while True:
            await asyncio.sleep(self._note_seconds)
            with suppress(StoreUnavailable):
                if not await self._steps.is_claimed(request.policy, request.n):
                    return

    async def _log_run(self, request: TrainStep) -> None:
        """Best effort: the figures stay in the ledger."""
        if self._run_log is None:
            return
        try:
            record = await self._steps.record(request.policy, request.n)
            if record is not None:
                await asyncio.to_thread(self._run_log, record)
        except (OSError, StoreUnavailable) as error:
            log.warning("step not in the run log", extra={"step": request.n, "why": str(error)})

    async def _pause(self, request: TrainStep, reason: str) -> StepDone:
        """Abandon the step, whose samples are fresh again, and leave training to its operator."""
        await self._steps.abandon_and_pause(request.policy, request.n, reason)
        log.warning("training paused", extra={"policy": request.policy, "step": request.n, "why": reason})
        return _ended(request, StepState.ABANDONED, reason)


class _Progress:
    """Status of the attempt: a `StatusCallback` that keeps the newest one."""

    def __init__(self) -> None:
        self.now: tuple[str, Pace | None] = ("begins", None)

    def __call__(self, status: str, pace: Pace | None = None) -> None:
        self.now = (status, pace)


def _log_progress(request: TrainStep, now: str, pace: Pace | None) -> None:
    known = None if pace is None else {name: round(value, 1) for name, value in asdict(pace).items()}
    log.info("step goes on", extra={"policy": request.policy, "step": request.n, "now": now} | (known or {}))


def _without_number(progress: str) -> str:
    """The ledger's row and its readers name the step themselves."""
    return progress.partition(": ")[2] or progress


def _lost(attempts: Attempts) -> str:
    return (
        f"the trainer ended {attempts.lost} times without an error: if `dmesg` names the OOM killer, lower"
        " --micro-batch-tokens or --max-tokens; `clawloop plan` says what fits"
    )


def _made(version: VersionRef, state: StepState, trained: TrainedStep | None = None) -> StepDone:
    figures = None if trained is None else trained.figures
    return StepDone(
        policy=version.policy,
        n=version.n,
        state=state,
        parent=version.parent,
        path=version.path,
        sha256=version.sha256,
        samples=None if figures is None else len(figures.samples),
        tokens=None if figures is None else figures.tokens,
        loss=None if figures is None else figures.loss,
        kl=None if figures is None else figures.kl,
        ratio=None if figures is None else figures.ratio,
        seconds=None if trained is None else trained.seconds,
    )


def _ended(request: TrainStep, state: StepState, reason: str) -> StepDone:
    return StepDone(policy=request.policy, n=request.n, state=state, reason=reason[:REASON_LIMIT])
