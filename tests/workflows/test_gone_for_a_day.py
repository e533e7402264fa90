"""A trainer, its disk or PostgreSQL is gone for a day: nothing gives up, and no history grows by waiting.

The day is not waited for: what would end a wait is looked up, and a day's attempts follow each other at once.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning, training

pytestmark = pytest.mark.slow

# Attempts of a day: the first follow each other faster, the others each minute.
DAY = 1440


async def events(learner: Learner) -> int:
    return len((await learner.handle.fetch_history()).events)


async def test_no_time_ends_a_steps_wait_for_its_trainer(client: Client) -> None:
    scripted = ScriptedLearning()
    learner = Learner(client, scripted)
    async with learning(client, scripted, trainer=False):
        await learner.samples(scripted.needed)
        await until(lambda: "claim 1: 16" in scripted.happened)
        await learner.shows("step 1")
        history = await learner.handle.fetch_history()
        scheduled = [
            event.activity_task_scheduled_event_attributes
            for event in history.events
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        ]
        (step,) = (found for found in scheduled if found.activity_type.name == "train_step")
        assert not step.schedule_to_start_timeout.ToTimedelta()
        assert not step.schedule_to_close_timeout.ToTimedelta()
        assert step.retry_policy.maximum_attempts == 0
        assert step.retry_policy.maximum_interval.ToTimedelta() == timedelta(minutes=1)
        assert not history.events[0].workflow_execution_started_event_attributes.workflow_run_timeout.ToTimedelta()
        async with training(client, scripted):
            await until(lambda: scripted.version == 1)
    assert scripted.happened.count("claim 1: 16") == 1


@pytest.mark.parametrize("attempts", [30, pytest.param(DAY, marks=pytest.mark.long)])
async def test_a_step_that_fails_for_a_day_is_committed_afterwards_from_the_same_batch(
    client: Client, attempts: int
) -> None:
    scripted = ScriptedLearning()
    gone = [
        ApplicationError("PostgreSQL is away", type="StoreUnavailable", next_retry_delay=timedelta(milliseconds=1))
    ] * attempts
    scripted.fails = lambda n: gone.pop() if gone else None
    learner = Learner(client, scripted)
    async with learning(client, scripted, trainer=False):
        await learner.samples(scripted.needed)
        await until(lambda: "claim 1: 16" in scripted.happened)
        await learner.shows("step 1")
        before = await events(learner)
        async with training(client, scripted):
            await until(lambda: not gone, seconds=300)
            await until(lambda: scripted.version == 1)
            assert await events(learner) <= before + 40  # as without failures: a retry is no event
    assert scripted.happened.count("train 1") == attempts + 1
    assert scripted.happened.count("claim 1: 16") == 1
