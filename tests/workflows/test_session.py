"""A session's workflow: what it has judged, when it closes, what it tells, how it goes on."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.judging.judge_turn import JudgeTurn
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import PAYLOAD_WARN_BYTES, ClawloopPlugin
from clawloop.core.contracts.notices import SessionErased, SessionNotice
from clawloop.core.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnResult
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import TurnId, new_feedback_id, new_turn_id
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE, Conversation, ScriptedActivities, until, working
from tests.workflows.test_whole import at_work, end, tell
from workflows import descriptions, names
from workflows.session import SessionWorkflow
from workflows.state import INBOX_LIMIT

__all__ = ["bench", "binary_bench", "judge"]


# A session's workflow: what it has judged, when it closes, and how it goes on.

CHATTY_TURNS = 20
# Of sessions that are to close for no other reason.
SOON = timedelta(seconds=0.5)
IDLE_SOON = "idle for 0.00833333 min"


async def test_each_turn_is_handed_to_judging_once_and_the_end_closes_the_session(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    first = await talk.say()
    await talk.say(turn_id=first)  # the gateway and the sweep may both tell
    last = await talk.say(ends=True)
    summary = await talk.handle.result()
    assert sorted(ask.turn_id for ask in scripted.judged) == [first, last]  # side by side, in any order
    assert (summary.why, summary.guarantee) == ("the client ended the session", "has a sample")
    (closing,) = scripted.closed
    assert (closing.session_id, closing.up_to) == (talk.session, last)


async def test_the_turn_that_opens_a_session_starts_no_judging(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.say(opens=True, version=3)
    description = await talk.handle.describe()
    second = await talk.say()
    await until(lambda: bool(scripted.judged))
    last = await talk.say(ends=True)
    await talk.handle.result()
    assert sorted(ask.turn_id for ask in scripted.judged) == [second, last]
    assert not description.raw_description.pending_activities


async def test_a_session_may_end_with_the_turn_that_opens_it(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    only = await talk.say(opens=True, ends=True)
    await talk.handle.result()
    (closing,) = scripted.closed
    assert (closing.up_to, scripted.judged) == (only, [])


async def test_judging_never_blocks_later_turns_and_is_bounded(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    scripted.gate.clear()
    turns: list[TurnId] = []
    for running in (1, 2, 3, 4):  # one after the other: turns that come together are judged together
        turns.append(await talk.say())
        await until(lambda running=running: len(scripted.judged) == running)  # type: ignore[misc]
    turns += [await talk.say() for _ in range(2)]
    assert scripted.now == 4
    scripted.gate.set()
    await talk.say(ends=True)
    await talk.handle.result()
    assert set(turns) < {ask.turn_id for ask in scripted.judged}
    assert scripted.most == 4


async def pending(talk: Conversation, activities: int) -> None:
    """Wait until the session has so many judging activities that have not ended."""
    async with asyncio.timeout(60):
        while len((await talk.handle.describe()).raw_description.pending_activities) < activities:
            await asyncio.sleep(0.02)


async def test_a_chatty_session_does_not_keep_the_judges_from_others(client: Client) -> None:
    scripted = ScriptedActivities()
    scripted.gate.clear()
    async with working(client, scripted, judges=1):
        chatty = Conversation(client)
        await chatty.begin(in_flight=40)
        for waiting in range(1, CHATTY_TURNS + 1):  # one after the other: turns that come together share an activity
            await chatty.say()
            await pending(chatty, waiting)
        quiet = Conversation(client)
        await quiet.say(ends=True)
        await pending(quiet, 1)
        scripted.seconds = 0.02
        scripted.gate.set()
        await quiet.handle.result()
        assert scripted.runs.index(quiet.session) <= 5  # first come, first served would be CHATTY_TURNS


async def test_a_judging_that_fails_is_decided_with_the_stored_votes(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    broken = new_turn_id()

    def fails(ask: JudgeTurn) -> ApplicationError | None:
        refused = ApplicationError("the judge refused: 404", type="JudgeRefused", non_retryable=True)
        return refused if ask.turn_id == broken and ask.give_up is None else None

    scripted.fails = fails
    await talk.say(turn_id=broken)
    await until(lambda: len(scripted.judged) == 2)
    await talk.say(ends=True)
    await talk.handle.result()
    asks = [ask.give_up for ask in scripted.judged if ask.turn_id == broken]
    assert asks == [None, "the judge refused: 404"]


async def test_turns_that_the_closing_finds_are_judged_before_the_close(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    missed = new_turn_id()
    # It is found once more although it was judged: then it is given up rather than tried for ever.
    scripted.missed = [[missed], [missed]]
    await talk.say(ends=True)
    await talk.handle.result()
    assert [ask.turn_id for ask in scripted.judged if ask.itself] == [missed]
    assert [ask.give_up for ask in scripted.closed] == [False, False, True]


async def test_turns_that_stay_unjudged_do_not_block_later_ones(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    stuck, behind = new_turn_id(), new_turn_id()
    scripted.missed = [[stuck], [behind, stuck], [stuck]]
    await talk.say(ends=True)
    await talk.handle.result()
    assert [ask.turn_id for ask in scripted.judged if ask.itself] == [stuck, behind]
    assert [(ask.tried_up_to, ask.give_up) for ask in scripted.closed] == [
        (None, False),
        (stuck, False),
        (behind, False),
        (behind, True),
    ]


async def test_an_older_turn_that_comes_late_does_not_keep_an_ended_session_open(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    older, newest = new_turn_id(), new_turn_id()
    scripted.gate.clear()
    await talk.say(turn_id=newest, ends=True)
    await until(lambda: len(scripted.judged) == 1)
    await talk.say(turn_id=older)  # e.g. it waited in a spool
    scripted.gate.set()
    assert (await talk.handle.result()).why == "the client ended the session"
    assert [ask.turn_id for ask in scripted.judged] == [newest, older]


async def test_a_closed_session_opens_again_with_its_next_turn(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.say(ends=True)
    first = await talk.handle.describe()
    await talk.handle.result()
    await talk.say()
    await until(lambda: len(scripted.judged) == 2)
    again = await talk.handle.describe()
    assert first.id == again.id
    assert first.run_id != again.run_id
    assert again.status is WorkflowExecutionStatus.RUNNING


async def test_feedback_that_arrives_after_the_close_is_judged_by_a_new_run(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    turn = await talk.say(ends=True)
    await talk.handle.result()
    given = FeedbackGiven(new_feedback_id(), turn)
    await talk.notifier.notify(SessionNotice(talk.facts, given))
    await until(lambda: len(scripted.judged) == 2)
    assert (scripted.judged[1].turn_id, scripted.judged[1].feedback_id) == (turn, given.feedback_id)
    # The session is not open for that: it closes again at once.
    assert (await talk.handle.result()).why == "it was closed before"
    assert [ask.again for ask in scripted.closed] == [False, True]


async def test_feedback_on_an_open_session_leaves_it_open(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    scripted.open_after_all = True
    given = FeedbackGiven(new_feedback_id(), new_turn_id())
    await talk.notifier.notify(SessionNotice(talk.facts, given))
    await until(lambda: len(scripted.closed) == 1)
    left_open = await talk.handle.describe()
    await talk.say()
    await until(lambda: len(scripted.judged) == 2)
    await talk.say(ends=True)
    assert (await talk.handle.result()).why == "the client ended the session"
    assert [ask.again for ask in scripted.closed] == [True, False]
    assert (await talk.handle.describe()).run_id == left_open.run_id


async def test_a_turn_that_comes_while_a_session_closes_keeps_it_open(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    missed = new_turn_id()
    scripted.missed = [[missed]]
    last = await talk.say(ends=True)
    await until(lambda: len(scripted.judged) == 1)
    scripted.gate.clear()
    await until(lambda: len(scripted.judged) == 2)
    later = await talk.say(ends=True)
    scripted.gate.set()
    await talk.handle.result()
    assert [ask.up_to for ask in scripted.closed] == [last, last, later]


async def test_a_turn_is_judged_again_once_for_two_equal_requests(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    turn = await talk.say(ends=True)
    await talk.handle.result()
    scripted.gate.clear()
    for _ in range(2):
        await talk.notifier.notify(SessionNotice(talk.facts, RejudgeRequested(turn, 1)))
    await until(lambda: len(scripted.judged) == 2)
    await talk.notifier.notify(SessionNotice(talk.facts, RejudgeRequested(turn, 1)))  # it is being judged
    scripted.gate.set()
    await talk.say(ends=True)
    await talk.handle.result()
    asked = [(ask.turn_id, ask.revision) for ask in scripted.judged]
    assert asked[:2] == [(turn, None), (turn, 1)]
    assert len(asked) == 3


async def test_a_turn_after_the_last_one_keeps_the_session_open(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client, SOON)
    scripted.gate.clear()
    await talk.say(ends=True)
    await until(lambda: len(scripted.judged) == 1)
    later = await talk.say()
    await until(lambda: len(scripted.judged) == 2)
    scripted.gate.set()
    assert (await talk.handle.result()).why == IDLE_SOON
    assert [(ask.why, ask.up_to) for ask in scripted.closed] == [(IDLE_SOON, later)]


async def test_an_idle_session_closes_and_a_turn_moves_its_deadline(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client, timedelta(seconds=2))
    await talk.say()
    summary = await talk.handle.result()
    assert summary.why == "idle for 0.0333333 min"
    assert len(scripted.closed) == 1


async def test_a_woken_session_closes_without_any_turn(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client, SOON)
    await talk.notifier.notify(SessionNotice(talk.facts, None))
    await talk.handle.result()
    (closing,) = scripted.closed
    assert closing.up_to is None


async def test_waking_a_session_that_runs_already_changes_nothing(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.say()
    running = await talk.handle.describe()
    # The sweep does so every minute until the session has closed.
    await talk.notifier.notify(SessionNotice(talk.facts, None))
    assert (await talk.handle.describe()).run_id == running.run_id
    await talk.say(ends=True)
    assert (await talk.handle.result()).why == "the client ended the session"


async def test_turns_whose_votes_cancel_out_are_asked_directly_before_the_close(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    scripted.missed, scripted.tied = [[new_turn_id()]], [new_turn_id(), new_turn_id()]
    await talk.say(ends=True)
    await talk.handle.result()
    assert sorted(scripted.asked_directly) == sorted(scripted.tied)
    assert [(ask.asked_directly, ask.give_up) for ask in scripted.closed] == [
        (False, False),
        (False, False),
        (True, False),
    ]


async def test_a_failed_direct_vote_does_not_keep_a_session_open(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    scripted.tied = [new_turn_id(), new_turn_id()]
    refused = ApplicationError("the judge refused: 404", type="JudgeRefused", non_retryable=True)
    scripted.fails = lambda ask: refused if ask.turn_id == scripted.tied[0] else None
    await talk.say(ends=True)
    summary = await talk.handle.result()
    assert (summary.guarantee, len(scripted.asked_directly), len(scripted.closed)) == ("has a sample", 2, 2)


async def test_a_session_whose_turns_were_erased_judges_none_of_them_and_ends(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    scripted.gate.clear()
    turns = []
    for running in (1, 2, 3, 4):  # one after the other: turns that come together are judged together
        turns.append(await talk.say())
        await until(lambda running=running: len(scripted.judged) == running)  # type: ignore[misc]
    turns += [await talk.say(), await talk.say()]
    for _ in range(2):
        await talk.notifier.notify(SessionErased(talk.session, ContentErased(tuple(turns), whole=True)))
    scripted.gate.set()
    assert (await talk.handle.result()).why == "erased"
    assert len(scripted.judged) == 4
    # Nobody has to hear of it any more.
    await talk.notifier.notify(SessionErased(talk.session, ContentErased(tuple(turns), whole=True)))


async def test_a_turn_after_the_erasure_keeps_the_session_open(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client, SOON)
    scripted.gate.clear()
    erased = await talk.say()
    await until(lambda: len(scripted.judged) == 1)
    later = await talk.say()
    await until(lambda: len(scripted.judged) == 2)
    await talk.notifier.notify(SessionErased(talk.session, ContentErased((erased,), whole=True)))
    scripted.gate.set()
    assert (await talk.handle.result()).why == IDLE_SOON
    assert [(ask.why, ask.up_to) for ask in scripted.closed] == [(IDLE_SOON, later)]
    assert [ask.turn_id for ask in scripted.judged] == [erased, later]


async def test_turns_that_wait_are_judged_by_one_activity(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(in_flight=1)
    turns = [await talk.say()]
    await until(lambda: len(scripted.judged) == 1)
    turns += [await talk.say() for _ in range(11)]
    turns.append(await talk.say(ends=True))
    scripted.gate.set()
    await talk.handle.result()
    assert sorted(ask.turn_id for ask in scripted.judged) == turns
    assert [ask.turn_ids for ask in scripted.together] == [turns[1:9], turns[9:]]


async def test_a_turn_that_cannot_be_judged_takes_no_other_with_it(
    client: Client, scripted: ScriptedActivities
) -> None:
    talk = Conversation(client)
    unusable = new_turn_id()
    scripted.missed = [[new_turn_id(), unusable]]

    def fails(ask: JudgeTurn) -> ApplicationError | None:
        refused = ApplicationError("refused", type="JudgeRefused", non_retryable=True)
        return refused if ask.turn_id == unusable and ask.give_up is None else None

    scripted.fails = fails
    await talk.say(ends=True)
    await talk.handle.result()
    (asked, given_up) = scripted.together
    assert (asked.itself, asked.give_up) == (True, None)
    assert (given_up.turn_ids, given_up.itself, given_up.give_up) == (asked.turn_ids, True, "refused")


async def test_feedback_between_turns_keeps_its_own_judging(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(in_flight=1)
    first = await talk.say()
    await until(lambda: len(scripted.judged) == 1)
    before = [await talk.say(), await talk.say()]
    given = FeedbackGiven(new_feedback_id(), first)
    await talk.notifier.notify(SessionNotice(talk.facts, given))
    after = [await talk.say(), await talk.say(ends=True)]
    scripted.gate.set()
    await talk.handle.result()
    assert [ask.turn_ids for ask in scripted.together] == [before, after]
    assert [ask.turn_id for ask in scripted.judged if ask.feedback_id == given.feedback_id] == [first]
    assert {ask.turn_id for ask in scripted.judged} == {first, *before, *after}


# What a session tells in the Temporal UI, read over the API from which the UI reads it.


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
    assert "|1|main|+1|yes||sampled: verdict good: 3 of 3 votes good|" in lines

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


# Sessions longer than one history: they continue as new with all unhandled messages.


@pytest.mark.parametrize(
    ("count", "roll_over_events"),
    # Of few events, since turns that wait are judged together; the long one rolls over when the server suggests it.
    [
        (600, 300),
        pytest.param(5_000, None, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
    ids=["600", "5000"],
)
async def test_a_session_of_thousands_of_turns_has_each_judged_once_over_several_runs(
    client: Client, scripted: ScriptedActivities, count: int, roll_over_events: int | None
) -> None:
    talk = Conversation(client)
    await talk.begin(roll_over_events=roll_over_events)
    turns = [new_turn_id() for _ in range(count)]
    waiting = iter(enumerate(turns))

    async def send() -> None:
        for number, turn in waiting:
            # A person never is this much ahead of the judge; 200 messages survive a roll-over.
            while number - len(scripted.judged) > 100:
                await asyncio.sleep(0.02)
            await talk.say(turn_id=turn)

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(send())
    await talk.say(ends=True)
    async with asyncio.timeout(120):
        summary = await talk.handle.result()
    counted = Counter(ask.turn_id for ask in scripted.judged)
    assert set(turns) <= set(counted)
    assert set(counted.values()) == {1}
    assert summary.guarantee == "has a sample"
    runs, events, largest = await histories(client, talk)
    assert runs > 1
    assert events <= 12 * count
    assert largest < PAYLOAD_WARN_BYTES
    print(f"\n{count} turns: {runs} runs, {events / count:.1f} events a turn, largest event {largest} bytes")  # noqa: T201


async def histories(client: Client, talk: Conversation) -> tuple[int, int, int]:
    """How many runs there were, their events in all, and the largest event in bytes."""
    runs = events = largest = 0
    described = await talk.handle.describe()
    run_id: str | None = described.raw_description.workflow_execution_info.first_run_id
    while run_id:
        handle = client.get_workflow_handle(described.id, run_id=run_id)
        history = await handle.fetch_history()
        runs += 1
        events += len(history.events)
        largest = max(largest, *(event.ByteSize() for event in history.events))
        ended = history.events[-1].workflow_execution_continued_as_new_event_attributes
        run_id = ended.new_execution_run_id or None
    return runs, events, largest


async def test_no_message_is_lost_in_a_roll_over(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.begin(roll_over_events=20)
    scripted.seconds = 0.01
    turns: list[TurnId] = []

    def all_judged() -> bool:
        return set(turns) <= {ask.turn_id for ask in scripted.judged}

    for _ in range(3):  # turns that come together are judged together: each round is more events than one history takes
        turns.extend([await talk.say() for _ in range(25)])
        await until(all_judged)
    await talk.say(ends=True)
    async with asyncio.timeout(60):
        await talk.handle.result()
    assert (await histories(client, talk))[0] >= 3


@pytest.mark.timeout(600)
async def test_no_turn_is_left_to_the_closing_while_its_judge_is_away(
    client: Client, scripted: ScriptedActivities
) -> None:
    """A new run takes over 200 messages, so the history grows until the judge has left as few."""
    talk = Conversation(client)
    await talk.begin(roll_over_events=200)
    scripted.gate.clear()
    # From its 200th event on it waits for its judge to end, to roll over; the other turns come meanwhile.
    turns = [await talk.say() for _ in range(60)]
    turns.extend(await asyncio.gather(*(talk.say() for _ in range(INBOX_LIMIT))))
    scripted.gate.set()
    await until(lambda: set(turns) <= {ask.turn_id for ask in scripted.judged}, seconds=200)
    assert set(Counter(ask.turn_id for ask in scripted.judged).values()) == {1}
    assert (await histories(client, talk))[0] > 1


@pytest.mark.timeout(600)
async def test_the_longest_history_ends_with_the_newest_turns_and_all_feedback(
    client: Client, scripted: ScriptedActivities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day without a judge must not make a history that no worker replays in time."""
    monkeypatch.setattr("workflows.session.ROLL_OVER_WAIT", timedelta(seconds=1))
    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(roll_over_events=50)
    for _ in range(4):
        await talk.say()
    await until(lambda: len(scripted.judged) == 4)
    feedback = FeedbackGiven(new_feedback_id(), new_turn_id())
    await talk.notifier.notify(SessionNotice(talk.facts, feedback))
    await asyncio.gather(*(talk.say() for _ in range(INBOX_LIMIT)))
    newest = [await talk.say() for _ in range(20)]
    async with asyncio.timeout(200):
        while (await histories(client, talk))[0] < 2:
            await asyncio.sleep(0.2)
    scripted.gate.set()
    wanted = {*newest, feedback.turn_id}
    await until(lambda: wanted <= {ask.turn_id for ask in scripted.judged}, seconds=200)
    assert feedback.feedback_id in {ask.feedback_id for ask in scripted.judged}


# Sessions whose rows are deleted, turns unknown or judges rate-limited; real Temporal and PostgreSQL.


async def test_turns_whose_rows_are_deleted_do_not_block_a_session(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation("one", "two", "three")
    session = await b.insert(*turns)
    b.execute("DELETE FROM turns WHERE id = %s", turns[-1].turn_id)
    async with at_work(client, b):
        for turn in turns:
            await tell(client, session, turn, ends=turn is turns[-1])
        await end(client, session)
    # The second one's next state went with the third.
    outcomes = [(await b.turn(turn.turn_id)).outcome for turn in turns[:-1]]
    assert outcomes == [TurnOutcome.SAMPLED, TurnOutcome.NO_FEEDBACK]
    assert len(b.judge.requests) == 1


async def test_a_session_whose_rows_are_all_deleted_ends(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation("one", "two")
    session = await b.insert(*turns)
    b.execute("DELETE FROM turns")
    b.execute("DELETE FROM sessions")
    async with at_work(client, b):
        for turn in turns:
            await tell(client, session, turn, ends=turn is turns[-1])
        await end(client, session)
    assert b.judge.requests == []
    assert b.rows("SELECT * FROM judgements") == []


async def test_messages_about_unknown_turns_change_nothing(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    unknown = new_turn_id()
    turns = b.conversation("one", "two")
    session = await b.insert(*turns)
    facts = SessionFacts(session, "default", "x-session-id", turns[0].started_at, 0)
    sessions = TemporalNotifier(client, IDLE)
    async with at_work(client, b):
        await tell(client, session, replace(turns[0], turn_id=unknown))
        await sessions.notify(SessionNotice(facts, FeedbackGiven(new_feedback_id(), new_turn_id())))
        await sessions.notify(SessionNotice(facts, RejudgeRequested(new_turn_id(), 3)))
        await tell(client, session, turns[1], ends=True)
        await tell(client, session, turns[0])  # late, and out of order
        await end(client, session)
    outcomes = [(await b.turn(turn.turn_id)).outcome for turn in turns]
    assert outcomes == [TurnOutcome.SAMPLED, TurnOutcome.NO_FEEDBACK]
    assert len(b.rows("SELECT * FROM judgements")) == 1


async def test_a_judge_is_asked_again_after_its_429s_retry_after(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation("one", "two")
    session = await b.insert(*turns)
    b.judge.mode, b.judge.retry_after = "429", "5"
    async with at_work(client, b):
        await tell(client, session, turns[0])
        await tell(client, session, turns[1], ends=True)
        async with asyncio.timeout(60):
            while not b.judge.requests:
                await asyncio.sleep(0.02)
        refused = time.monotonic()
        b.judge.mode = "well"
        await end(client, session)
    # Our own first pause would be a second.
    assert time.monotonic() - refused > 4.5
    assert len(b.judge.requests) == 2
    assert (await b.turn(turns[0].turn_id)).outcome is TurnOutcome.SAMPLED


# Deadlines and waits of minutes and hours, with time skipped.


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
