"""`clawloop check replay` on a real Temporal: workflows that can go on with this code, and one that cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from typer.testing import CliRunner, Result

from clawloop.app.cli.main import app
from clawloop.app.temporal.replay import replay
from tests.replay.record import HISTORIES
from tests.workflows.conftest import Conversation, ScriptedActivities, end_all, scripted, until
from tests.workflows.test_whole import Server
from workflows import names
from workflows.state import SessionState

__all__ = ["scripted"]

pytestmark = pytest.mark.slow


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """Of a server of its own: the command checks all open workflows, and other tests leave some."""
    server = Server(tmp_path / "temporal")
    with server.running():
        yield await server.ready()


@workflow.defn(name=names.SESSION_WORKFLOW)
class FormerSession:
    """A session's workflow of a version that judged first, and waited for turns afterwards."""

    @workflow.run
    async def run(self, state: SessionState) -> None:
        await workflow.execute_activity(
            "judge_turn", state.session_id, task_queue=names.JUDGE_QUEUE, start_to_close_timeout=timedelta(hours=1)
        )

    @workflow.signal(name=names.TURN_RECORDED)
    def turn_recorded(self, turn: object) -> None: ...


async def check_replay(client: Client, *options: str) -> Result:
    here = {"TEMPORAL_ADDRESS": client.service_client.config.target_host}
    return await asyncio.to_thread(CliRunner().invoke, app, ["check", "replay", *options], env=here)


async def listed(client: Client, count: int) -> None:
    """Wait until Temporal lists so many open workflows: its list lags behind what runs."""
    async with asyncio.timeout(60):
        while len([run.id async for run in client.list_workflows("ExecutionStatus = 'Running'")]) < count:
            await asyncio.sleep(0.05)


async def test_open_workflows_of_this_version_can_go_on(client: Client, scripted: ScriptedActivities) -> None:
    talks = [Conversation(client) for _ in range(2)]
    for talk in talks:
        await talk.say()
        await talk.say()
    await until(lambda: len(scripted.judged) == 4)
    await listed(client, len(talks))
    checked = await check_replay(client)
    assert checked.stdout == "open workflows: 2 Session; 2 of 2 can go on with this version.\n"
    assert checked.exit_code == 0
    counted = json.loads((await check_replay(client, "--json")).stdout)
    assert {replayed["workflow_id"] for replayed in counted} == {talk.handle.id for talk in talks}
    assert {replayed["problem"] for replayed in counted} == {None}
    assert min(replayed["events"] for replayed in counted) > 5


async def test_an_open_workflow_that_this_code_cannot_continue_is_named(client: Client) -> None:
    talk = Conversation(client)
    try:
        async with Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=[FormerSession],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            handle = await talk.begin()
            async with asyncio.timeout(60):
                while not (await handle.describe()).raw_description.pending_activities:
                    await asyncio.sleep(0.05)
        await listed(client, 1)
        checked = await check_replay(client)
    finally:
        await end_all(client)
    assert checked.exit_code == 1
    named, counted = checked.stdout.splitlines()
    assert named.startswith(f"cannot go on: {talk.handle.id} (Session): [TMPRL1100] Nondeterminism error: ")
    assert named.endswith("ActivityTaskScheduled)")
    assert counted == "open workflows: 1 Session; 0 of 1 can go on with this version."


async def test_a_saved_history_replays_and_a_changed_one_does_not() -> None:
    text = (HISTORIES / "ended_by_the_client.json").read_text()
    assert await replay(WorkflowHistory.from_json("session/saved", text)) is None
    changed = text.replace('"judge_turn"', '"another_activity"')
    assert "another_activity" in str(await replay(WorkflowHistory.from_json("session/changed", changed)))
