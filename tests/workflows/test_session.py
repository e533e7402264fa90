"""A session's workflow: what it has judged, when it closes, and how it goes on."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError

from activities.judging.judge_turn import JudgeTurn
from clawloop.core.contracts.notices import SessionErased, SessionNotice
from clawloop.core.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested
from clawloop.core.ids import TurnId, new_feedback_id, new_turn_id
from tests.workflows.conftest import Conversation, ScriptedActivities, until, working

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
