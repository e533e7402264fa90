"""A trainer, its disk or PostgreSQL is gone for a day: nothing gives up, and no history grows by waiting.

A judge is given up after minutes; what it missed is judged once it is back and an operator asks.

The day is not waited for: what would end a wait is looked up, and a day's attempts follow each other at once.
"""

from __future__ import annotations

import errno
from datetime import timedelta

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from clawloop.core.errors import AdapterUnreadable, ClawloopError, StoreUnavailable
from clawloop.training.adapters.files import write_error
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning, training
from tests.workflows.test_judge_command import clawloop, end_unjudged
from tests.workflows.test_whole import at_work
from workflows import names
from workflows.activity_options import JUDGE

__all__ = ["bench", "binary_bench", "judge"]

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


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("PostgreSQL is away"),
        write_error(1, OSError(errno.EIO, "Input/output error")),
        AdapterUnreadable("default/v1 cannot be read: Input/output error"),
    ],
    ids=["postgresql", "disk that cannot be written", "disk that cannot be read"],
)
@pytest.mark.parametrize("attempts", [30, pytest.param(DAY, marks=pytest.mark.long)])
async def test_a_step_that_fails_for_a_day_is_committed_afterwards_from_the_same_batch(
    client: Client, attempts: int, error: ClawloopError
) -> None:
    scripted = ScriptedLearning()
    gone = [
        ApplicationError(str(error), type=type(error).__name__, next_retry_delay=timedelta(milliseconds=1))
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


async def test_what_an_absent_judge_missed_is_judged_once_it_is_back_and_an_operator_asks(
    client: Client, binary_bench: Bench
) -> None:
    b = binary_bench
    # Transient, unlike a refusal; its own pause stands for the minutes between attempts.
    b.judge.mode, b.judge.retry_after = "503", "0.01"
    async with at_work(client, b):
        session, turns = await end_unjudged(client, b)
        assert b.rows("SELECT * FROM samples") == []
        assert (
            await _most_attempts(client, names.session_workflow_id(session)) == JUDGE["retry_policy"].maximum_attempts
        )

        b.judge.mode, b.judge.retry_after = "well", None
        said = await clawloop(client, b, "--unjudged")
        assert said.stdout.count("is judged again") == 2, said.stdout
        await until(lambda: len(b.rows("SELECT * FROM samples")) == 2)
    assert [(await b.turn(turn.turn_id)).outcome for turn in turns] == ["sampled", "sampled", "no_feedback"]


async def _most_attempts(client: Client, workflow_id: str) -> int:
    """Of the activity of a workflow's run that was tried most often."""
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    return max(event.activity_task_started_event_attributes.attempt for event in history.events)
