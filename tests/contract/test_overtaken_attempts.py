"""Attempts at a step that Temporal has given up, and that still reach PostgreSQL while the next one computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from activities.training.train_step import StepDone, TrainingActivities
from clawloop.core.contracts.training import (
    Attempts,
    GateCheck,
    Pace,
    StatusCallback,
    StepBatch,
    StepProgress,
    StepState,
    TrainedStep,
    TrainingState,
)
from clawloop.core.errors import (
    AdapterUnusable,
    NothingToTrain,
    PermanentError,
    StepDiverged,
    StepTooLarge,
    TrainerUnavailable,
)
from tests.contract.desk import ASK, Desk, desk
from tests.contract.learning import POLICY
from tests.fakes.trainer import FakeTrainer

__all__ = ["desk"]


class Silent(FakeTrainer):
    """Computes on a machine that Temporal does not hear from any more, and that still reaches PostgreSQL."""

    def __init__(self) -> None:
        super().__init__(machine="silent")
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        self.begun.set()
        await self.goes_on.wait()
        return await super().train(step, report)


async def train_overtaken(desk: Desk) -> tuple[StepDone, StepDone]:
    """What a silent attempt returns, which commits while the next one computes, and what that one returns."""
    silent, train = Silent(), desk.trainer.train
    first = asyncio.create_task(TrainingActivities(desk.learning.steps, silent).train_step(ASK))
    async with asyncio.timeout(60):
        await silent.begun.wait()

    async def overtaken(step: StepBatch, report: StatusCallback) -> TrainedStep:
        silent.goes_on.set()
        await first
        return await train(step, report)

    desk.trainer.train = overtaken  # type: ignore[method-assign]
    second = await desk.activities.train_step(ASK)
    return await first, second


@pytest.mark.parametrize(
    "error",
    [
        None,
        NothingToTrain("no sample of 4 can be trained"),
        StepDiverged("loss nan, gradient norm nan"),
        AdapterUnusable("default/v0 was trained on another base"),
        StepTooLarge("out of memory at 5 attempts; lower --micro-batch-tokens"),
    ],
    ids=lambda error: "another version" if error is None else type(error).__name__,
)
async def test_an_attempt_whose_silent_predecessor_committed_returns_the_version_of_that_one(
    desk: Desk, error: PermanentError | None
) -> None:
    await desk.claim()
    desk.trainer.fails = [] if error is None else [error]
    first, second = await train_overtaken(desk)
    assert first.state is StepState.CANDIDATE
    # The workflow has the gate decide about a candidate, and about nothing else.
    assert second == StepDone(
        policy=POLICY, n=1, state=StepState.CANDIDATE, parent=0, path=first.path, sha256=first.sha256
    )
    view = await desk.learning.steps.status(POLICY)
    assert (view.state, view.step_state) == (TrainingState.TRAINING, StepState.CANDIDATE)
    assert await desk.learning.gate.accept(POLICY, 1) == (StepState.COMMITTED, "")


async def test_an_attempt_whose_silent_predecessors_version_was_decided_returns_the_decision(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.claim()
    commit = desk.learning.steps.commit

    async def decided_before(batch: StepBatch, trained: TrainedStep, checks: Sequence[GateCheck] = ()) -> StepState:
        if (await desk.learning.steps.candidate(POLICY, 1)) is not None:
            await desk.learning.gate.accept(POLICY, 1)
        return await commit(batch, trained, checks)

    monkeypatch.setattr(desk.learning.steps, "commit", decided_before)
    first, second = await train_overtaken(desk)
    assert (second.state, second.sha256) == (StepState.COMMITTED, first.sha256)


async def test_an_overtaken_attempt_leaves_the_status_to_the_next_one_and_is_counted(desk: Desk) -> None:
    await desk.claim()
    steps = desk.learning.steps
    first, second = [await steps.begin_attempt(POLICY, 1) for _ in range(2)]
    await steps.note_progress(POLICY, 1, second.begun, "training, micro-batch 3 of 8", Pace(5120.0, 130.0))
    await steps.note_progress(POLICY, 1, first.begun, "loading the model")
    counted = [
        await steps.end_attempt(POLICY, 1, first.begun, failed=failed, why="a rank died") for failed in (True, False)
    ]
    assert counted == [Attempts(2, failed=1, interrupted=0), Attempts(2, failed=1, interrupted=1)]
    shown = (await steps.status(POLICY)).progress
    assert shown is not None
    assert shown.seconds is not None
    assert (shown.now, shown.tokens_a_second, shown.seconds_left) == ("training, micro-batch 3 of 8", 5120.0, 130.0)
    assert await steps.begin_attempt(POLICY, 1) == Attempts(3, failed=1, interrupted=1)


async def test_an_attempt_that_fails_after_the_next_one_began_does_not_say_that_the_step_waits(desk: Desk) -> None:
    await desk.claim()
    silent, train = Silent(), desk.trainer.train
    silent.fails = [TrainerUnavailable("a rank died")]
    first = asyncio.create_task(TrainingActivities(desk.learning.steps, silent).train_step(ASK))
    async with asyncio.timeout(60):
        await silent.begun.wait()
    seen: list[StepProgress | None] = []

    async def overtaking(step: StepBatch, report: StatusCallback) -> TrainedStep:
        silent.goes_on.set()
        with pytest.raises(TrainerUnavailable):
            await first
        seen.append((await desk.learning.steps.status(POLICY)).progress)
        return await train(step, report)

    desk.trainer.train = overtaking  # type: ignore[method-assign]
    assert (await desk.activities.train_step(ASK)).state is StepState.CANDIDATE
    assert [(shown and shown.now, shown and shown.seconds is not None) for shown in seen] == [("beginning", True)]
