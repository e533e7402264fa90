"""Claiming, committing and ending steps, in memory and in PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from clawloop.core.contracts.training import Claim, SampleState, StepState, TrainingState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import RecordUnusable
from clawloop.core.recipes.recipe import Recipe
from tests.contract.learning import HOURS, POLICY, RECIPE, Learning, commit, recipe, step, trained


async def test_a_new_policy_waits_for_samples(learning: Learning) -> None:
    view = await learning.steps.status(POLICY)
    assert (view.state, view.reason, view.step, view.step_state) == (
        TrainingState.WAITING,
        "0 of 4 samples",
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
    assert (sample.hinted_prompt_ids, sample.explicit) == ([1, 9, 2, 3], True)
    assert (plain.hinted_prompt_ids, plain.explicit) == (None, False)


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
    assert [sample.hinted_prompt_ids is None for sample in batch.samples] == [True, False, False, False]
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
    assert {sample.sample_id: sample.hinted_prompt_ids for sample in batch.samples}[both] is None
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
