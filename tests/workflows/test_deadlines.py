"""Deadlines and waits of minutes and hours, with time skipped."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.judging.judge_turn import JudgeTurn
from clawloop.app.temporal.plugin import ClawloopPlugin
from tests.workflows.conftest import Conversation, ScriptedActivities
from workflows import names
from workflows.session import SessionWorkflow


@pytest.fixture
async def skipping() -> AsyncIterator[tuple[WorkflowEnvironment, ScriptedActivities]]:
    program = Path(sys.executable).with_name("temporal-test-server")
    async with await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(program), plugins=[ClawloopPlugin()]
    ) as environment:
        scripted = ScriptedActivities()
        client: Client = environment.client
        kinds = {key.name: IndexedValueType.ValueType(key.indexed_value_type) for key in names.SEARCH_ATTRIBUTES}
        await client.operator_service.add_search_attributes(AddSearchAttributesRequest(search_attributes=kinds))
        async with (
            Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]),
            Worker(client, task_queue=names.LEDGER_QUEUE, activities=[scripted.close_session]),
            Worker(client, task_queue=names.JUDGE_QUEUE, activities=[scripted.judge_turn, scripted.judge_turns]),
        ):
            yield environment, scripted


async def test_a_session_closes_half_an_hour_after_its_last_turn(
    skipping: tuple[WorkflowEnvironment, ScriptedActivities],
) -> None:
    environment, scripted = skipping
    talk = Conversation(environment.client)
    await talk.say()
    await environment.sleep(timedelta(minutes=20))
    await talk.say()
    await environment.sleep(timedelta(minutes=20))
    assert scripted.closed == []  # the second turn moved the deadline
    await environment.sleep(timedelta(minutes=11))
    assert (await talk.handle.result()).why == "idle for 30 min"


async def test_a_judge_that_fails_for_minutes_is_retried_and_then_given_up(
    skipping: tuple[WorkflowEnvironment, ScriptedActivities],
) -> None:
    environment, scripted = skipping

    def fails(ask: JudgeTurn) -> ApplicationError | None:
        away = ApplicationError("the judge answered 500", type="JudgeUnavailable")
        return away if ask.give_up is None else None

    scripted.fails = fails
    talk = Conversation(environment.client)
    await talk.say(ends=True)
    await environment.sleep(timedelta(minutes=5))
    assert scripted.closed == []
    await environment.sleep(timedelta(minutes=5))
    await talk.handle.result()
    assert [ask.give_up for ask in scripted.judged] == [None] * 12 + ["the judge answered 500"]


async def test_an_hour_of_500s_costs_only_the_turns_of_that_hour_their_verdict(
    skipping: tuple[WorkflowEnvironment, ScriptedActivities],
) -> None:
    environment, scripted = skipping
    down = True

    def fails(ask: JudgeTurn) -> ApplicationError | None:
        away = ApplicationError("the judge answered 500", type="JudgeUnavailable")
        return away if down and ask.give_up is None else None

    scripted.fails = fails
    talk = Conversation(environment.client)
    during = []
    for _ in range(3):
        during.append(await talk.say())
        await environment.sleep(timedelta(minutes=20))
    down = False
    after = await talk.say(ends=True)
    summary = await talk.handle.result()
    assert summary.why == "the client ended the session"
    for turn in during:
        asked = [ask.give_up for ask in scripted.judged if ask.turn_id == turn]
        assert asked == [None] * 12 + ["the judge answered 500"]
    assert [ask.give_up for ask in scripted.judged if ask.turn_id == after] == [None]


async def test_a_judge_is_asked_again_after_its_retry_after(
    skipping: tuple[WorkflowEnvironment, ScriptedActivities],
) -> None:
    environment, scripted = skipping
    later = ApplicationError("the judge answered 429", type="JudgeUnavailable", next_retry_delay=timedelta(minutes=7))
    scripted.fails = lambda ask: later if len(scripted.judged) == 1 else None
    talk = Conversation(environment.client)
    await talk.say(ends=True)
    await environment.sleep(timedelta(minutes=6))
    assert len(scripted.judged) == 1
    await environment.sleep(timedelta(minutes=2))
    await talk.handle.result()
    assert len(scripted.judged) == 2
