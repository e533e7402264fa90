"""The activity that trains a step: each way a batch can end, in memory and in PostgreSQL."""

from __future__ import annotations

import asyncio

import pytest

from activities.training.steps import REASON_LIMIT
from activities.training.train_step import LOST_ATTEMPTS, StepDone, TrainingActivities, TrainStep
from clawloop.core.contracts.training import (
    CheckResult,
    Pace,
    SampleState,
    StatusCallback,
    StepBatch,
    StepProgress,
    StepState,
    TrainedStep,
    TrainingState,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import (
    AdapterUnreadable,
    AdapterUnusable,
    DiskFull,
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
from clawloop.core.recipes.recipe import Recipe
from clawloop.training.ranks import ignore_status
from tests.contract.desk import ASK, Desk, desk
from tests.contract.learning import POLICY, recipe
from tests.fakes.trainer import FakeTrainer

__all__ = ["desk"]


async def test_a_trained_step_is_a_candidate_with_its_figures_and_checks(desk: Desk) -> None:
    samples, batch = await desk.claim()
    desk.trainer.dropped = {samples[3]: "9000 tokens, the trainer takes 8192"}
    done = await desk.activities.train_step(ASK)
    made = await desk.learning.steps.candidate(POLICY, 1)
    assert made is not None
    assert (done.state, done.path, done.sha256, done.parent) == (StepState.CANDIDATE, made.path, made.sha256, 0)
    assert (done.samples, done.loss, done.reason) == (3, 0.5, "")
    assert desk.trainer.taken == [batch]
    (check,) = await desk.learning.gate.checks(POLICY, 1)
    assert (check.result, check.figures["seconds"]) == (CheckResult.PASSED, 0.25)
    assert (await desk.learning.operators.versions(POLICY))[1].gate_seconds == 0.25
    await desk.learning.gate.accept(POLICY, 1)
    assert await desk.learning.sample_result(samples[0]) == (
        SampleState.TRAINED,
        TurnOutcome.TRAINED,
        "trained in step 1",
    )
    why = "left out of step 1: 9000 tokens, the trainer takes 8192"
    assert await desk.learning.sample_result(samples[3]) == (SampleState.EXPIRED, TurnOutcome.EXPIRED, why)


async def test_what_a_step_does_can_be_read_while_it_runs(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[StepProgress | None] = []

    class Watched(FakeTrainer):
        async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
            for now, pace in (("loading the model", None), ("training, micro-batch 3 of 8", Pace(5120.0, 130.0))):
                report(f"step {step.n}: {now}", pace)
                async with asyncio.timeout(60):
                    while (shown := (await desk.learning.steps.status(POLICY)).progress) is None or shown.now != now:
                        await asyncio.sleep(0.001)
                seen.append(shown)
            return await super().train(step, report)

    assert (await desk.learning.steps.status(POLICY)).progress is None
    await desk.claim()
    assert (await desk.learning.steps.status(POLICY)).progress == StepProgress("waiting for the trainer")
    with caplog.at_level("INFO", logger="activities.training.train_step"):
        await TrainingActivities(desk.learning.steps, Watched(), note_seconds=0.001).train_step(ASK)
    logged = [vars(record) for record in caplog.records if record.message == "step goes on"]
    (training,) = [line for line in logged if line["now"] == "training, micro-batch 3 of 8"]
    assert (training["step"], training["tokens_a_second"], training["seconds_left"]) == (1, 5120.0, 130.0)
    assert [each is not None and each.seconds is not None and 0 <= each.seconds < 100 for each in seen] == [True, True]
    paces = [each and (each.tokens_a_second, each.seconds_left) for each in seen]
    assert paces == [(None, None), (5120.0, 130.0)]
    at_the_gate = StepProgress("checking version 1 at the gate")
    assert (await desk.learning.steps.status(POLICY)).progress == at_the_gate
    await desk.learning.steps.note_progress(POLICY, 1, 1, "too late")
    assert (await desk.learning.steps.status(POLICY)).progress == at_the_gate
    await desk.learning.gate.accept(POLICY, 1)
    assert (await desk.learning.steps.status(POLICY)).progress == StepProgress("publishing version 1")


async def test_a_new_attempt_begins_anew_and_a_store_that_is_away_costs_no_step(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.claim()
    await desk.learning.steps.begin_attempt(POLICY, 1)
    await desk.learning.steps.note_progress(POLICY, 1, 1, "training, micro-batch 3 of 8", Pace(5120.0, 130.0))
    await desk.learning.steps.begin_attempt(POLICY, 1)
    shown = (await desk.learning.steps.status(POLICY)).progress
    assert shown is not None
    assert (shown.now, shown.tokens_a_second, shown.seconds_left) == ("beginning", None, None)

    asked = asyncio.Event()

    async def away(policy: str, n: int, attempt: int, progress: str, pace: Pace | None = None) -> None:
        asked.set()
        raise StoreUnavailable("PostgreSQL did not answer in time")

    class Patient(FakeTrainer):
        async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
            report("step 1: loading the model")
            await asked.wait()
            return await super().train(step, report)

    monkeypatch.setattr(desk.learning.steps, "note_progress", away)
    done = await TrainingActivities(desk.learning.steps, Patient(), note_seconds=0.001).train_step(ASK)
    assert done.state is StepState.CANDIDATE


async def test_a_step_that_made_its_version_is_not_trained_again(desk: Desk) -> None:
    await desk.claim()
    first = await desk.activities.train_step(ASK)
    made = StepDone(policy=POLICY, n=1, state=StepState.CANDIDATE, parent=0, path=first.path, sha256=first.sha256)
    assert await desk.activities.train_step(ASK) == made
    await desk.learning.gate.accept(POLICY, 1)
    assert await desk.activities.train_step(ASK) == made.model_copy(update={"state": StepState.COMMITTED})
    assert len(desk.trainer.taken) == 1


async def test_a_step_that_diverges_is_set_aside_and_training_continues(desk: Desk) -> None:
    samples, _ = await desk.claim()
    desk.trainer.fails = [StepDiverged("loss nan, gradient norm nan")]
    done = await desk.activities.train_step(ASK)
    assert done == StepDone(policy=POLICY, n=1, state=StepState.QUARANTINED, reason="loss nan, gradient norm nan")
    assert (await desk.learning.steps.status(POLICY)).state is TrainingState.WAITING
    assert (await desk.learning.sample_result(samples[0]))[0] is SampleState.QUARANTINED
    assert await desk.activities.train_step(ASK) == done  # its answer was lost
    _, batch = await desk.claim(2)
    assert batch.lr_scale == 0.5


async def test_a_version_beyond_the_limits_fails_the_check_of_its_numbers(desk: Desk) -> None:
    await desk.learning.set_recipe(Recipe.model_validate(recipe().model_dump() | {"gate": {"grad_norm": 0.5}}))
    await desk.claim()
    assert (await desk.activities.train_step(ASK)).state is StepState.CANDIDATE
    (check,) = await desk.learning.gate.checks(POLICY, 1)
    assert (check.result, check.reason) == (CheckResult.FAILED, "gradient norm 1, limit 0.5 (gate.grad_norm)")


async def test_a_step_that_can_never_succeed_is_quarantined_and_training_pauses(desk: Desk) -> None:
    error = AdapterUnusable("default/v0 was trained on another base")
    samples, _ = await desk.claim()
    desk.trainer.fails = [error]
    done = await desk.activities.train_step(ASK)
    assert done == StepDone(policy=POLICY, n=1, state=StepState.QUARANTINED, reason=str(error))
    view = await desk.learning.steps.status(POLICY)
    assert (view.state, view.reason, view.head) == (TrainingState.PAUSED, f"paused: step 1: {error}", 0)
    assert (await desk.learning.sample_result(samples[0]))[0] is SampleState.QUARANTINED
    # Its answer was lost: asked again, the same.
    assert await desk.activities.train_step(ASK) == done
    assert len(desk.trainer.taken) == 1


async def test_a_batch_with_nothing_to_train_expires_and_training_continues(desk: Desk) -> None:
    samples, _ = await desk.claim()
    desk.trainer.fails = [NothingToTrain("no sample of 4 can be trained: 9000 tokens, the trainer takes 8192")]
    done = await desk.activities.train_step(ASK)
    why = "no sample of 4 can be trained: 9000 tokens, the trainer takes 8192"
    assert (done.state, done.reason) == (StepState.ABANDONED, why)
    assert await desk.learning.sample_result(samples[0]) == (SampleState.EXPIRED, TurnOutcome.EXPIRED, f"step 1: {why}")
    assert (await desk.learning.steps.status(POLICY)).state is TrainingState.WAITING
    assert await desk.activities.train_step(ASK) == done
    await desk.claim(2)
    assert (await desk.activities.train_step(TrainStep(policy=POLICY, n=2))).state is StepState.CANDIDATE


@pytest.mark.parametrize(
    "error",
    [
        RecipeRejected("50, but the vocabulary has 40", field="train.distillation.top_k"),
        DiskFull("5 MiB are free: make room, then `clawloop training resume`"),
        ModelUnsupported("/models/it lacks 2 tensors, the first is model.norm.weight"),
        StepTooLarge("out of memory at 5 attempts; lower --micro-batch-tokens"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_recipe_a_model_or_a_disk_that_does_not_do_pauses_training_and_keeps_the_samples(
    desk: Desk, error: PermanentError
) -> None:
    samples, _ = await desk.claim()
    desk.trainer.fails = [error]
    done = await desk.activities.train_step(ASK)
    assert done == StepDone(policy=POLICY, n=1, state=StepState.ABANDONED, reason=str(error))
    view = await desk.learning.steps.status(POLICY)
    assert (view.state, view.reason, view.ready) == (TrainingState.PAUSED, f"paused: step 1: {error}", 4)
    assert (await desk.learning.sample_result(samples[0]))[0] is SampleState.FRESH
    assert not await desk.learning.work_waiting()
    assert await desk.activities.train_step(ASK) == done  # its answer was lost
    await desk.learning.operators.resume(POLICY)
    assert (await desk.learning.steps.claim(POLICY, 2)).samples == 4


async def test_a_rejected_recipe_that_was_replaced_does_not_pause_training(desk: Desk) -> None:
    await desk.claim()
    desk.trainer.fails = [RecipeRejected("50, but the vocabulary has 40", field="train.distillation.top_k")]
    await desk.learning.operators.set_recipe(POLICY, recipe(drift=0.5))
    assert (await desk.activities.train_step(ASK)).state is StepState.ABANDONED
    view = await desk.learning.steps.status(POLICY)
    assert (view.state, view.ready) == (TrainingState.WAITING, 4)
    assert (await desk.learning.steps.claim(POLICY, 2)).samples == 4


@pytest.mark.parametrize("error", [TrainerUnavailable("a rank died"), AdapterUnreadable("v1 cannot be read")])
async def test_what_is_away_leaves_the_batch_claimed_and_the_status_says_so(desk: Desk, error: TransientError) -> None:
    await desk.claim()
    desk.trainer.fails = [error]
    with pytest.raises(type(error)):
        await desk.activities.train_step(ASK)
    status = await desk.learning.steps.status(POLICY)
    assert status.step_state is StepState.CLAIMED
    assert status.progress == StepProgress(f"waits to be tried again: {error}")
    assert (await desk.activities.train_step(ASK)).state is StepState.CANDIDATE


async def test_a_trainer_that_fails_five_times_pauses_training_with_what_to_set(desk: Desk) -> None:
    await desk.claim()
    why = "out of memory: 3 of 4 samples do not fit alone; lower --max-tokens"
    for _ in range(4):
        for error in (TrainerUnavailable("a rank is being restarted"), TrainerFailed(why)):  # only one of them counts
            desk.trainer.fails = [error]
            with pytest.raises(type(error)):
                await desk.activities.train_step(ASK)
            assert (await desk.learning.steps.status(POLICY)).step_state is StepState.CLAIMED
    desk.trainer.fails = [TrainerFailed(why)]
    done = await desk.activities.train_step(ASK)
    assert (done.state, done.reason) == (StepState.ABANDONED, f"{why} (failed 5 times)")
    view = await desk.learning.steps.status(POLICY)
    assert (view.state, view.reason, view.ready) == (TrainingState.PAUSED, f"paused: step 1: {why} (failed 5 times)", 4)


async def test_a_trainer_that_is_killed_again_and_again_pauses_training_with_what_to_set(desk: Desk) -> None:
    samples, _ = await desk.claim()
    for _ in range(LOST_ATTEMPTS):
        assert (await desk.learning.steps.status(POLICY)).state is not TrainingState.PAUSED
        desk.trainer.bug = KeyError("nothing is noted, as after kill -9")
        with pytest.raises(KeyError):
            await desk.activities.train_step(ASK)
    done = await desk.activities.train_step(ASK)
    assert done.state is StepState.ABANDONED
    assert done.reason.startswith("10 attempts ended without a word, perhaps killed for want of memory")
    assert len(done.reason) < REASON_LIMIT
    view = await desk.learning.steps.status(POLICY)
    assert (view.state, view.reason, view.ready) == (TrainingState.PAUSED, f"paused: step 1: {done.reason}", 4)
    assert (await desk.learning.sample_result(samples[0]))[0] is SampleState.FRESH
    assert len(desk.trainer.taken) == LOST_ATTEMPTS
    await desk.learning.operators.resume(POLICY)
    assert (await desk.learning.steps.claim(POLICY, 2)).samples == 4
    assert (await desk.activities.train_step(TrainStep(policy=POLICY, n=2))).state is StepState.CANDIDATE


async def test_attempts_that_something_else_ended_never_pause_training(desk: Desk) -> None:
    await desk.claim()
    for _ in range(LOST_ATTEMPTS + 2):
        desk.trainer.bug = asyncio.CancelledError()  # the trainer is stopped, as for a deploy
        with pytest.raises(asyncio.CancelledError):
            await desk.activities.train_step(ASK)
        desk.trainer.fails = [TrainerUnavailable("the trainer is being restarted")]
        with pytest.raises(TrainerUnavailable):
            await desk.activities.train_step(ASK)
    assert (await desk.activities.train_step(ASK)).state is StepState.CANDIDATE


async def test_a_step_whose_policy_was_rolled_back_meanwhile_is_abandoned(desk: Desk) -> None:
    samples, _ = await desk.claim()
    train = desk.trainer.train

    async def slow(step: StepBatch, report: object) -> object:
        trained = await train(step, ignore_status)
        await desk.learning.operators.roll_back(POLICY, 0)
        return trained

    desk.trainer.train = slow  # type: ignore[method-assign, assignment]
    done = await desk.activities.train_step(ASK)
    assert done.state is StepState.ABANDONED
    assert done.reason
    assert (await desk.learning.sample_result(samples[0]))[0] is SampleState.FRESH


async def test_an_unclaimed_step_is_rejected(desk: Desk) -> None:
    with pytest.raises(RecordUnusable, match="no step 7"):
        await desk.activities.train_step(TrainStep(policy=POLICY, n=7))


async def test_long_reasons_are_cut_before_they_cross_temporal(desk: Desk) -> None:
    await desk.claim()
    desk.trainer.fails = [AdapterUnusable("x" * 500)]
    assert len((await desk.activities.train_step(ASK)).reason) == 200
