"""Claiming, committing and ending steps, and the activity that trains them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from activities.training.steps import REASON_LIMIT
from activities.training.train_step import LOST_ATTEMPTS, StepDone, TrainingActivities, TrainStep
from clawloop.core.contracts.training import (
    Attempts,
    CheckResult,
    Claim,
    GateCheck,
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
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Recipe
from clawloop.operations.export import ExportFilter
from clawloop.training.ranks import ignore_status
from clawloop.training.run_log import TensorBoardLog, scalars_of
from db.export import PostgresExportStore
from tests.contract.learning import HOURS, POLICY, RECIPE, Learning, PostgresLearning, commit, recipe, step, trained
from tests.fakes.trainer import FakeTrainer

# Claiming, committing and ending steps, in memory and in PostgreSQL.


async def test_a_new_policy_waits_for_samples(learning: Learning) -> None:
    view = await learning.steps.status(POLICY)
    assert (view.state, view.reason, view.step, view.step_state) == (
        TrainingState.WAITING,
        "0 of 4 samples for the next step",
        1,
        None,
    )
    assert (view.head, view.version, view.epoch, view.unpublished, view.oldest_seconds) == (0, 0, 0, False, None)
    assert await learning.steps.claim(POLICY, 1) == Claim(POLICY, 1, None, 0, "0 of 4 samples")


async def test_an_unknown_policy_is_an_error(learning: Learning) -> None:
    for call in (learning.steps.status("other"), learning.steps.claim("other", 1), learning.steps.batch("other", 1)):
        with pytest.raises(RecordUnusable, match="other"):
            await call
    with pytest.raises(RecordUnusable, match="no step 1"):
        await learning.steps.batch(POLICY, 1)
    assert await learning.steps.committed(POLICY, 1) is None


async def test_the_oldest_samples_are_claimed_once_in_their_order(learning: Learning) -> None:
    samples = await learning.add_samples(6)
    assert await learning.work_waiting()
    first = await learning.steps.claim(POLICY, 1)
    assert first == Claim(POLICY, 1, StepState.CLAIMED, 4, "4 of 4 samples")
    again = await learning.steps.claim(POLICY, 1)
    assert (again.state, again.samples) == (StepState.CLAIMED, 4)
    batch = await learning.steps.batch(POLICY, 1)
    assert [sample.sample_id for sample in batch.samples] == samples[:4]
    assert (batch.n, batch.base_model, batch.parent, batch.epoch, batch.recipe) == (1, "tiny", None, 0, RECIPE)
    assert await learning.steps.batch(POLICY, 1) == batch
    for _ in range(2):
        await learning.steps.begin_attempt(POLICY, 1)
    assert not await learning.work_waiting()
    view = await learning.steps.status(POLICY)
    assert (view.state, view.reason, view.step, view.step_state, view.ready) == (
        TrainingState.TRAINING,
        "computing step 1 (attempt 2)",
        1,
        StepState.CLAIMED,
        2,
    )


async def test_a_sample_has_all_that_its_turn_recorded(learning: Learning) -> None:
    await learning.add_samples(1, reward=-0.5, hinted=[1, 9, 2, 3], explicit=True)
    await learning.add_samples(3)
    await learning.steps.claim(POLICY, 1)
    sample, plain, *_ = (await learning.steps.batch(POLICY, 1)).samples
    assert (sample.prompt_ids, sample.response_ids, sample.logprobs) == ([1, 2, 3], [4, 5], [-0.5, -0.25])
    assert (sample.temperature, sample.version, sample.reward) == (0.6, 0, -0.5)
    assert (sample.hinted_prompts, sample.explicit) == ({0: [1, 9, 2, 3]}, True)
    assert (plain.hinted_prompts, plain.explicit) == ({}, False)


async def test_only_the_next_step_is_claimed_and_one_at_a_time(learning: Learning) -> None:
    await learning.add_samples(8)
    assert await learning.steps.claim(POLICY, 2) == Claim(POLICY, 2, None, 0, "the next step is 1")
    await learning.steps.claim(POLICY, 1)
    assert await learning.steps.claim(POLICY, 2) == Claim(POLICY, 2, None, 0, "step 1 is claimed")
    assert await learning.work_waiting()  # a batch is left behind


async def test_a_smaller_batch_is_taken_once_its_oldest_sample_has_waited(learning: Learning) -> None:
    await learning.add_samples(2)
    assert (await learning.steps.claim(POLICY, 1)).state is None
    await learning.age(23 * HOURS)
    assert await learning.steps.claim(POLICY, 1) == Claim(POLICY, 1, None, 0, "2 of 4 samples")
    await learning.age(2 * HOURS)
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, 2)
    assert claim.reason == "2 of 4 samples; the oldest waited 24 h"


async def test_a_committed_step_is_the_head_and_its_turns_are_trained(learning: Learning) -> None:
    first, dropped, *_ = await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    batch = await learning.steps.batch(POLICY, 1)
    result = trained(batch, dropped={dropped: "drifted: mean |log ratio| 1.20, bound 1"})
    assert await commit(learning, batch, result) is StepState.COMMITTED
    assert await commit(learning, batch, result) is StepState.COMMITTED
    assert await learning.steps.committed(POLICY, 1) == result.version
    assert await learning.sample_result(first) == (SampleState.TRAINED, TurnOutcome.TRAINED, "trained in step 1")
    state, outcome, why = await learning.sample_result(dropped)
    assert (state, outcome) == (SampleState.EXPIRED, TurnOutcome.EXPIRED)
    assert why == "left out of step 1: drifted: mean |log ratio| 1.20, bound 1"
    view = await learning.steps.status(POLICY)
    assert (view.state, view.head, view.version, view.step, view.unpublished) == (TrainingState.WAITING, 1, 0, 2, True)
    again = await learning.steps.claim(POLICY, 1)
    assert (again.state, again.samples) == (StepState.COMMITTED, 4)
    with pytest.raises(RecordUnusable, match="committed"):
        await learning.steps.batch(POLICY, 1)


async def test_the_next_step_starts_from_the_last_version(learning: Learning) -> None:
    await step(learning, 1)
    await learning.add_samples(4, version=1)
    await learning.steps.claim(POLICY, 2)
    batch = await learning.steps.batch(POLICY, 2)
    assert batch.parent == await learning.steps.committed(POLICY, 1)
    await commit(learning, batch, trained(batch))
    made = await learning.steps.committed(POLICY, 2)
    assert made is not None
    assert (made.n, made.parent) == (2, 1)


async def test_of_two_trainers_of_one_step_exactly_one_commits(learning: Learning) -> None:
    await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    batch = await learning.steps.batch(POLICY, 1)
    ends = await asyncio.gather(
        *(learning.steps.commit(batch, trained(batch, sha256=f"{digit}" * 64)) for digit in "abcdef")
    )
    assert sorted(ends) == sorted([StepState.CANDIDATE] + [StepState.ABANDONED] * 5)
    made = await learning.steps.candidate(POLICY, 1)
    assert made is not None
    assert made.sha256 == "abcdef"[ends.index(StepState.CANDIDATE)] * 64


async def test_a_step_whose_policy_moved_on_is_abandoned_and_its_samples_are_fresh(learning: Learning) -> None:
    await step(learning, 1)
    samples = await learning.add_samples(4, version=1)
    await learning.steps.claim(POLICY, 2)
    batch = await learning.steps.batch(POLICY, 2)
    await learning.operators.roll_back(POLICY, 0)
    assert (await learning.steps.claim(POLICY, 2)).state is StepState.ABANDONED
    assert await commit(learning, batch, trained(batch)) is StepState.ABANDONED
    assert await learning.steps.committed(POLICY, 2) is None
    assert await learning.sample_result(samples[0]) == (SampleState.FRESH, TurnOutcome.SAMPLED, "verdict +1")
    assert await learning.work_waiting()
    assert (await learning.steps.claim(POLICY, 2)).samples == 4  # what it had; its number is used up
    claim = await learning.steps.claim(POLICY, 3)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, 4)
    again = await learning.steps.batch(POLICY, 3)
    assert (again.epoch, again.parent, [one.sample_id for one in again.samples]) == (1, None, samples)


async def test_a_trained_version_must_belong_to_its_step(learning: Learning) -> None:
    await learning.add_samples(8)
    await learning.steps.claim(POLICY, 1)
    batch = await learning.steps.batch(POLICY, 1)
    other = trained(batch).version
    for wrong in ({"n": 2}, {"parent": 1}, {"policy": "other"}):
        fields = {"policy": other.policy, "n": 1, "parent": 0, "path": other.path, "sha256": other.sha256} | wrong
        made = trained(batch).__class__(other.__class__(**fields), trained(batch).figures, 2.5)  # type: ignore[arg-type]
        with pytest.raises(RecordUnusable, match="is not the version that step 1"):
            await learning.steps.commit(batch, made)


async def test_abandoning_a_step_frees_its_samples_once(learning: Learning) -> None:
    samples = await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    await learning.steps.abandon(POLICY, 1, "the trainer cannot load the model")
    await learning.steps.abandon(POLICY, 1, "again")
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.reason) == (StepState.ABANDONED, "the trainer cannot load the model")
    assert await learning.work_waiting()
    await learning.steps.claim(POLICY, 2)
    assert [one.sample_id for one in (await learning.steps.batch(POLICY, 2)).samples] == samples
    await learning.steps.abandon(POLICY, 1, "late")
    assert (await learning.steps.status(POLICY)).step_state is StepState.CLAIMED


async def test_expiring_a_step_abandons_it_and_its_samples_expire(learning: Learning) -> None:
    samples = await learning.add_samples(5)
    await learning.steps.claim(POLICY, 1)
    for _ in range(2):
        await learning.steps.expire(POLICY, 1, "no sample of 4 can be trained: too long")
    why = "no sample of 4 can be trained: too long"
    assert await learning.sample_result(samples[0]) == (SampleState.EXPIRED, TurnOutcome.EXPIRED, f"step 1: {why}")
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.reason) == (StepState.ABANDONED, why)
    view = await learning.steps.status(POLICY)
    assert (view.state, view.ready, view.step) == (TrainingState.WAITING, 1, 2)
    assert not await learning.work_waiting()


async def test_a_bad_step_is_quarantined_and_training_pauses(learning: Learning) -> None:
    samples = await learning.add_samples(8)
    await learning.steps.claim(POLICY, 1)
    for _ in range(2):
        await learning.steps.quarantine(POLICY, 1, "KL 12.0, bound 10")
    assert await learning.sample_result(samples[0]) == (
        SampleState.QUARANTINED,
        TurnOutcome.QUARANTINED,
        "step 1: KL 12.0, bound 10",
    )
    view = await learning.steps.status(POLICY)
    assert (view.state, view.reason, view.ready) == (TrainingState.PAUSED, "paused: step 1: KL 12.0, bound 10", 4)
    assert not await learning.work_waiting()
    claim = await learning.steps.claim(POLICY, 2)
    assert claim == Claim(POLICY, 2, None, 0, "paused: step 1: KL 12.0, bound 10")
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.QUARANTINED


async def test_resuming_retries_quarantined_samples_only_on_request(learning: Learning) -> None:
    samples = await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    await learning.steps.quarantine(POLICY, 1, "not finite")
    view = await learning.operators.resume(POLICY)
    assert (view.state, view.ready) == (TrainingState.WAITING, 0)
    view = await learning.operators.resume(POLICY, retry_quarantined=True)
    assert (view.state, view.ready) == (TrainingState.WAITING, 4)
    assert await learning.sample_result(samples[0]) == (SampleState.FRESH, TurnOutcome.SAMPLED, "verdict +1")
    assert await learning.work_waiting()
    assert (await learning.steps.claim(POLICY, 2)).samples == 4


async def test_a_turn_trained_without_its_hint_shows_the_reason(learning: Learning) -> None:
    for n in (1, 2):
        await step(learning, n)
    (unreadable,) = await learning.add_samples(1, version=1, hinted=[1, 2])
    too_long, plain, *_ = await learning.add_samples(3, version=2, hinted=[1, 2])
    await learning.steps.claim(POLICY, 3)
    await learning.lose_files(1)
    batch = await learning.steps.batch(POLICY, 3)
    gone = "version 1, which answered, is gone"
    assert batch.without_hint == {unreadable: gone}
    assert [not sample.hinted_prompts for sample in batch.samples] == [True, False, False, False]
    result = trained(batch, without_hint={too_long: "9000 tokens, the trainer takes 8192"})
    assert await commit(learning, batch, result) is StepState.COMMITTED
    say = {
        unreadable: f"trained in step 3 without its hint: {gone}",
        too_long: "trained in step 3 without its hint: 9000 tokens, the trainer takes 8192",
        plain: "trained in step 3",
    }
    assert {sample: (await learning.sample_result(sample))[2] for sample in say} == say
    metrics = (await learning.operators.versions(POLICY))[3].metrics
    assert metrics is not None
    assert metrics["without_hint"] == 2
    # It is not forgotten on the way back and forth.
    await learning.operators.roll_back(POLICY, 2)
    assert (await learning.sample_result(too_long))[2] == f"{say[too_long]}, rolled back to 2"
    await learning.operators.roll_back(POLICY, 3)
    assert {sample: (await learning.sample_result(sample))[2] for sample in say} == say


async def test_a_dropped_sample_does_not_count_as_trained_without_its_hint(learning: Learning) -> None:
    for n in (1, 2):
        await step(learning, n)
    kept, left_out, *_ = await learning.add_samples(4, version=1, hinted=[1, 2])
    await learning.steps.claim(POLICY, 3)
    await learning.lose_files(1)
    batch = await learning.steps.batch(POLICY, 3)
    await commit(learning, batch, trained(batch, dropped={left_out: "drifted: 1.2, bound 1"}))
    assert (await learning.sample_result(kept))[2].startswith("trained in step 3 without its hint: ")
    assert (await learning.sample_result(left_out))[2] == "left out of step 3: drifted: 1.2, bound 1"
    metrics = (await learning.operators.versions(POLICY))[3].metrics
    assert metrics is not None
    assert (metrics["dropped"], metrics["without_hint"]) == (1, 3)


async def test_next_state_samples_become_stale_and_explicit_feedback_does_not(learning: Learning) -> None:
    for n in (1, 2, 3):
        await step(learning, n)
    (old,) = await learning.add_samples(1, version=0)
    (rated,) = await learning.add_samples(1, version=0, explicit=True)
    (near,) = await learning.add_samples(1, version=1)
    await learning.add_samples(2, version=3)
    assert (await learning.steps.claim(POLICY, 4)).state is StepState.CLAIMED
    assert await learning.sample_result(old) == (
        SampleState.EXPIRED,
        TurnOutcome.EXPIRED,
        "stale: 3 versions apart, bound 2",
    )
    batch = await learning.steps.batch(POLICY, 4)
    assert [sample.sample_id for sample in batch.samples][:2] == [rated, near]


async def test_after_a_roll_back_staleness_follows_the_version_tree(learning: Learning) -> None:
    for n in (1, 2):
        await step(learning, n)
    (other_branch,) = await learning.add_samples(1, version=2)
    await learning.operators.roll_back(POLICY, 0)
    await step(learning, 3, count=3)  # with the sample of version 2, two edges away
    assert (await learning.sample_result(other_branch))[0] is SampleState.TRAINED
    (too_far,) = await learning.add_samples(1, version=2)  # 2 → 1 → 0 → 3
    await learning.add_samples(4, version=3)
    await learning.steps.claim(POLICY, 4)
    assert (await learning.sample_result(too_far))[2] == "stale: 3 versions apart, bound 2"


async def test_samples_of_another_signal_expire_and_those_of_another_training_do_not(learning: Learning) -> None:
    (kept,) = await learning.add_samples(1)
    await learning.set_recipe(recipe(batch_samples=2))
    await learning.add_samples(1)
    assert (await learning.steps.claim(POLICY, 1)).samples == 2
    batch = await learning.steps.batch(POLICY, 1)
    assert kept in [sample.sample_id for sample in batch.samples]
    assert batch.recipe.train.batch_samples == 2
    (lost,) = await learning.add_samples(1)
    await commit(learning, batch, trained(batch))
    await learning.set_recipe(Recipe.model_validate({"name": "small", "signal": {"m": 5}}))
    assert (await learning.steps.claim(POLICY, 2)).state is None
    assert await learning.sample_result(lost) == (SampleState.EXPIRED, TurnOutcome.EXPIRED, "recipe changed")


async def test_a_sample_the_recipe_cannot_learn_from_is_not_claimed(learning: Learning) -> None:
    no_gap = {"verdict_weight": 1.0, "teacher_weight": 0.0}
    await learning.set_recipe(
        Recipe.model_validate(
            {"name": "small", "signal": {"hints": False}, "train": {"batch_samples": 1, "advantage": no_gap}}
        )
    )
    (hint_only,) = await learning.add_samples(1, reward=None, hinted=[1, 2])
    assert (await learning.steps.claim(POLICY, 1)).state is None
    assert await learning.sample_result(hint_only) == (
        SampleState.EXPIRED,
        TurnOutcome.EXPIRED,
        "neither a verdict nor a hint that this recipe learns from",
    )


async def test_earlier_versions_that_answered_hinted_samples_are_teachers(learning: Learning) -> None:
    for n in (1, 2):
        await step(learning, n)
    for version in (0, 1, 2):
        await learning.add_samples(1, version=version, hinted=[1, 2, 3])
    await learning.add_samples(1, version=1)
    await learning.steps.claim(POLICY, 3)
    batch = await learning.steps.batch(POLICY, 3)
    assert batch.teachers == {1: await learning.steps.committed(POLICY, 1)}  # not the base, not the parent


async def test_a_hint_without_its_teacher_is_dropped_and_the_verdict_trained(learning: Learning) -> None:
    for n in (1, 2):
        await step(learning, n)
    await learning.lose_files(1)
    (both,) = await learning.add_samples(1, version=1, hinted=[1, 2, 3])
    (hint_only,) = await learning.add_samples(1, version=1, reward=None, hinted=[1, 2, 3])
    await learning.add_samples(3, version=2)
    await learning.steps.claim(POLICY, 3)
    batch = await learning.steps.batch(POLICY, 3)
    assert batch.teachers == {}
    assert {sample.sample_id: sample.hinted_prompts for sample in batch.samples}[both] == {}
    assert (await learning.sample_result(hint_only))[2] == "version 1, which answered, is gone: its hint cannot be read"


async def test_no_batch_is_claimed_while_paused_and_a_running_step_finishes(learning: Learning) -> None:
    await learning.add_samples(8)
    await learning.steps.claim(POLICY, 1)
    view = await learning.operators.pause(POLICY, "lunch")
    assert (view.state, view.reason) == (TrainingState.PAUSED, "paused: lunch; step 1 is claimed")
    assert not await learning.work_waiting()
    batch = await learning.steps.batch(POLICY, 1)
    assert await commit(learning, batch, trained(batch)) is StepState.COMMITTED
    assert await learning.steps.claim(POLICY, 2) == Claim(POLICY, 2, None, 0, "paused: lunch")
    await learning.operators.resume(POLICY)
    assert await learning.work_waiting()
    assert (await learning.steps.claim(POLICY, 2)).samples == 4


async def test_the_status_has_the_waiting_time_of_the_oldest_sample(learning: Learning) -> None:
    await learning.add_samples(1)
    await learning.age(timedelta(minutes=5))
    oldest = (await learning.steps.status(POLICY)).oldest_seconds
    assert oldest is not None
    assert 300 <= oldest < 330


# The activity that trains a step: each way a batch can end, in memory and in PostgreSQL.


ASK = TrainStep(policy=POLICY, n=1)


class Desk:
    """The activity that trains steps, with a trainer that computes nothing."""

    def __init__(self, learning: Learning) -> None:
        self.learning = learning
        self.trainer = FakeTrainer()
        self.activities = TrainingActivities(learning.steps, self.trainer)

    async def claim(self, n: int = 1) -> tuple[list[SampleId], StepBatch]:
        samples = await self.learning.add_samples(4)
        assert (await self.learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
        return samples, await self.learning.steps.batch(POLICY, n)


@pytest.fixture
def desk(learning: Learning) -> Desk:
    return Desk(learning)


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


async def test_a_roll_back_stops_the_trainer_and_the_samples_go_to_the_next_step(desk: Desk) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    class Endless(FakeTrainer):
        async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stopped.set()
                raise
            raise AssertionError

    samples, _ = await desk.claim()
    activities = TrainingActivities(desk.learning.steps, Endless(), note_seconds=0.001)
    training = asyncio.create_task(activities.train_step(ASK))
    await begun.wait()
    await asyncio.sleep(0.05)
    assert not training.done()
    await desk.learning.operators.roll_back(POLICY, 0)
    done = await asyncio.wait_for(training, 60)
    assert stopped.is_set()
    assert done == StepDone(policy=POLICY, n=1, state=StepState.ABANDONED, reason="rolled back to version 0")
    assert (await desk.learning.operators.status(POLICY)).state is TrainingState.WAITING
    claim = await desk.learning.steps.claim(POLICY, 2)
    assert (claim.state, claim.samples) == (StepState.CLAIMED, len(samples))


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
    assert done.reason.startswith("the trainer ended 10 times without an error: if `dmesg` names the OOM killer")
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


# Attempts at a step that Temporal has given up, and that still reach PostgreSQL while the next one computes.


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


# A log of steps for TensorBoard: what TensorBoard reads of it is what the ledger holds.


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag → (step, value, time), as TensorBoard itself reads the run."""
    found = EventAccumulator(str(folder / POLICY)).Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


async def test_tensorboard_reads_the_stored_figures_of_each_step_once(learning: Learning, tmp_path: Path) -> None:
    activities = TrainingActivities(learning.steps, FakeTrainer(), run_log=TensorBoardLog(tmp_path).write)
    for n in (1, 2):
        await learning.add_samples(4)
        assert (await learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
        asked = TrainStep(policy=POLICY, n=n)
        await activities.train_step(asked)
        await activities.train_step(asked)  # retried: it is a candidate already
        await learning.gate.accept(POLICY, n)
        await activities.train_step(asked)  # or committed
    expected: dict[str, list[tuple[int, object, object]]] = {}
    for version in (await learning.operators.versions(POLICY))[1:]:
        assert version.metrics is not None
        for tag, value in scalars_of(version.metrics):
            at = version.created_at.timestamp()
            expected.setdefault(tag, []).append((version.n, pytest.approx(value), pytest.approx(at, abs=1e-3)))
    assert read(tmp_path) == expected  # of each figure one point a step
    assert {"loss", "kl", "tokens", "seconds", "parts/policy_gradient"} <= expected.keys()
    assert {len(points) for points in expected.values()} == {2}


async def test_a_folder_that_cannot_be_written_to_costs_no_step(
    learning: Learning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    activities = TrainingActivities(learning.steps, FakeTrainer(), run_log=TensorBoardLog(taken).write)
    await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    done = await activities.train_step(TrainStep(policy=POLICY, n=1))
    assert done.state is StepState.CANDIDATE
    assert "step not in the run log" in caplog.messages


# Steps and samples as they are exported from PostgreSQL.


async def test_steps_come_with_their_samples_and_are_continued(postgres_learning: PostgresLearning) -> None:
    for n in (1, 2):
        await step(postgres_learning, n)
    store = PostgresExportStore(postgres_learning.database)
    steps = await store.steps(ExportFilter(policy=POLICY), None, 10)
    assert [(line["n"], line["parent"], line["state"]) for line in steps] == [(1, 0, "committed"), (2, 1, "committed")]
    assert await store.steps(ExportFilter(), UUID(str(steps[0]["id"])), 10) == steps[1:]
    assert await store.steps(ExportFilter(policy="other"), None, 10) == []
    samples = await store.samples(ExportFilter(policy=POLICY), None, 100)
    for line in steps:
        assert line["samples"]
        assert {sample["id"] for sample in samples if sample["step"] == line["n"]} == set(line["samples"])  # type: ignore[arg-type]
    one = samples[0]
    of_session = await store.steps(ExportFilter(session=UUID(str(one["session"]))), None, 10)  # type: ignore[arg-type]
    assert one["step"] in [line["n"] for line in of_session]
