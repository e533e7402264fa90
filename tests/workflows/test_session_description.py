"""What a session tells in the Temporal UI, read over the API from which the UI reads it."""

from __future__ import annotations

import asyncio

from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client

from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_turn_id
from tests.workflows.conftest import Conversation, ScriptedActivities, until
from workflows import descriptions, names


async def current_details(talk: Conversation) -> str:
    metadata: WorkflowMetadata = await talk.handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    return metadata.current_details


def seen(markdown: str) -> list[str]:
    """The lines of a table, without the spaces that keep its columns apart."""
    return markdown.replace("\u00a0", "").splitlines()


async def test_the_ui_shows_a_sessions_turns(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.say()
    await until(lambda: len(scripted.judged) == 1)  # turns that come together are judged together
    await talk.say(version=3)
    await until(lambda: len(scripted.judged) == 2)
    async with asyncio.timeout(30):
        while "0 being judged" not in (details := await current_details(talk)):
            await asyncio.sleep(0.05)
    described = await talk.handle.describe()
    assert await described.static_summary() == "default: session known by x-session-id, open since 2026-01-02 00:00 UTC"
    assert await described.static_details() == (
        f"Session `{talk.session}` of the policy `default`. "
        f"[The page](http://127.0.0.1:30000/ui/sessions/{talk.session}) shows what was said, "
        "and why each reply was trained or not; so does "
        f"`clawloop session show {talk.session}`."
    )
    found = described.typed_search_attributes
    assert found[names.POLICY] == "default"
    assert found[names.SESSION] == str(talk.session)
    assert found[names.STATE] == "open"
    assert found[names.VERSION] == 3
    assert details.startswith("2 main turns received, 0 being judged, 0 waiting. Closes at ")
    assert f"`/ui/sessions/{talk.session}` on a gateway shows what was said" in details
    lines = seen(details)
    assert lines[2:4] == ["|turn|kind|verdict|sample|step|why|", "|:---|:---|:---|:---|:---|:---|"]
    assert "|1|main|+1|yes||sampled: verdict +1: 3 of 3 votes for 1|" in lines

    await talk.say(ends=True)
    await talk.handle.result()
    assert (await talk.handle.describe()).typed_search_attributes[names.STATE] == "closed"
    summaries = [
        event.user_metadata.summary.data.decode().strip('"')
        for event in (await talk.handle.fetch_history()).events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert set(summaries) == {
        "judge the reply that a new turn follows",
        "close the session: the client ended the session",
    }


async def test_sessions_are_found_by_policy_and_state(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.say()
    query = f"ClawPolicy = 'default' AND ClawState = 'open' AND ClawSession = '{talk.session}'"

    wanted = [names.session_workflow_id(talk.session)]
    async with asyncio.timeout(30):  # the list lags behind
        while [run.id async for run in client.list_workflows(query)] != wanted:
            await asyncio.sleep(0.05)


def test_the_table_keeps_its_form_whatever_a_reason_says() -> None:
    row = TurnResult(
        turn_id=new_turn_id(),
        number=7,
        kind="main",
        outcome=TurnOutcome.UNJUDGED,
        verdict=0,
        sample=False,
        step=12,
        why="a | b\nc",
    )
    unknown = row.model_copy(update={"number": None, "outcome": None, "verdict": None, "step": None, "why": "gone"})
    cut = row.model_copy(update={"outcome": TurnOutcome.NOT_TRAINABLE, "why": "not trainable: top_p"})
    assert seen(descriptions.session_table([row, unknown, cut]))[2:] == [
        "|7|main|0|no|12|unjudged: a / b c|",
        "|?|main||no||gone|",
        "|7|main|0|no|12|not trainable: top_p|",
    ]
    assert descriptions.session_table([]) == "No turn is decided yet."
