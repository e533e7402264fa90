"""A recipe's schedule keeps batches from being claimed, and says until when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from clawloop.core.contracts.training import Claim, StepState, TrainingState
from clawloop.core.recipes.recipe import Recipe
from tests.contract.learning import POLICY, Learning, PostgresLearning, recipe, step


def scheduled(**keys: object) -> Recipe:
    return recipe(schedule=keys)


def hours_from_now(begin: int, end: int) -> str:
    now = datetime.now(UTC)
    first, last = ((now + timedelta(hours=hours)).strftime("%H:00") for hours in (begin, end))
    return f"{first}-{last}"


async def test_outside_of_its_hours_a_full_batch_waits(learning: Learning) -> None:
    await learning.operators.set_recipe(POLICY, scheduled(hours=hours_from_now(3, 6)))
    await learning.add_samples(4)
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.reason[:20]) == (None, "outside of its hours")
    view = await learning.steps.status(POLICY)
    assert view.state is TrainingState.WAITING
    assert view.reason == f"{claim.reason}; 4 of 4 samples"
    assert view.closed_seconds is not None
    assert 2 * 3600 - 60 < view.closed_seconds <= 3 * 3600
    assert await learning.work_waiting()


async def test_within_its_hours_it_is_claimed(learning: Learning) -> None:
    await learning.operators.set_recipe(POLICY, scheduled(hours=hours_from_now(-3, 3)))
    await learning.add_samples(4)
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
    assert (await learning.steps.status(POLICY)).closed_seconds is None


async def test_no_more_versions_a_day_than_the_schedule_has(learning: Learning) -> None:
    # Where it is noon now: a day does not end while the test runs.
    zone = f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"
    await learning.operators.set_recipe(POLICY, scheduled(versions_a_day=1, time_zone=zone))
    await step(learning, 1)
    await learning.add_samples(4, version=1)
    refused = await learning.steps.claim(POLICY, 2)
    assert refused == Claim(POLICY, 2, None, 0, refused.reason)
    assert refused.reason.startswith(f"1 version was made today ({zone}), 1 at most, until ")
    await learning.age(timedelta(days=1))
    assert (await learning.steps.claim(POLICY, 2)).state is StepState.CLAIMED


async def test_what_a_policy_began_from_was_not_made_today(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    zone = f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"
    await step(learning, 1)
    await learning.operators.create_policy("anna", POLICY, scheduled(versions_a_day=1, time_zone=zone), 1)
    assert (await learning.steps.status("anna")).closed_seconds is None
    await learning.operators.set_recipe(POLICY, scheduled(versions_a_day=1, time_zone=zone))
    assert (await learning.steps.status(POLICY)).closed_seconds is not None


async def test_while_replies_are_slow_no_batch_is_claimed(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.set_recipe(POLICY, scheduled(chat_seconds=2.0))
    await learning.add_samples(4)
    slow = "UPDATE turns SET finished_at = now(), started_at = now() - %s"
    await learning.execute(slow, timedelta(seconds=9))
    claim = await learning.steps.claim(POLICY, 1)
    assert (claim.state, claim.reason) == (None, "replies take 9.0 s (p95 of 5 minutes), 2 s at most")
    assert (await learning.steps.status(POLICY)).closed_seconds == 60
    await learning.execute(slow, timedelta(seconds=1))
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


async def test_slow_agents_of_episodes_and_side_turns_hold_up_no_training(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.set_recipe(POLICY, scheduled(chat_seconds=2.0))
    await learning.add_samples(4)
    await learning.execute("UPDATE turns SET kind = 'side', finished_at = now(), started_at = now() - interval '9 s'")
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED


async def test_replies_of_a_while_ago_do_not_count(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.set_recipe(POLICY, scheduled(chat_seconds=2.0))
    await learning.add_samples(4)
    await learning.execute(
        "UPDATE turns SET finished_at = now() - interval '6 min', started_at = now() - interval '1 h'"
    )
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
