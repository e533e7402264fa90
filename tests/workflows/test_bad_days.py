"""Sessions whose rows are deleted, turns unknown or judges rate-limited; real Temporal and PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from temporalio.client import Client

from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import FeedbackGiven, RejudgeRequested, SessionFacts
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_feedback_id, new_turn_id
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE
from tests.workflows.test_whole import at_work, end, tell

__all__ = ["bench", "binary_bench", "judge"]


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
