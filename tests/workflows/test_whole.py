"""Sessions from announcement to sample: real Temporal, real PostgreSQL, a judge over HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

from temporalio.client import Client
from temporalio.worker import Worker

from activities.sweep import SweepActivities
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import SessionFacts, TurnRecorded
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.ids import SessionId
from db.sweep import PostgresSweepStore
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE, end_all, until
from workflows import names
from workflows.session import SessionWorkflow

__all__ = ["bench", "binary_bench", "judge"]


@asynccontextmanager
async def at_work(client: Client, bench: Bench) -> AsyncIterator[None]:
    async with (
        Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=[bench.ledger.close_session]),
        Worker(
            client,
            task_queue=names.JUDGE_QUEUE,
            activities=[bench.judging.judge_turn, bench.judging.judge_turns, bench.judging.collect_direct_vote],
        ),
    ):
        try:
            yield
        finally:
            await end_all(client)


async def tell(client: Client, session: SessionId, turn: TurnRecord, *, ends: bool = False) -> None:
    facts = SessionFacts(session, "default", "x-session-id", turn.started_at, turn.version)
    await TemporalNotifier(client, IDLE).notify(SessionNotice(facts, TurnRecorded(turn.turn_id, turn.version, ends)))


async def end(client: Client, session: SessionId) -> None:
    async with asyncio.timeout(120):
        await client.get_workflow_handle(names.session_workflow_id(session)).result()


async def test_out_of_order_late_and_repeated_turns_are_each_judged_once(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation(*(f"message {n}" for n in range(12)))
    session = await b.insert(*turns)
    told = [*turns[:-1], *turns[:-1]]
    random.Random(7).shuffle(told)
    async with at_work(client, b):
        for turn in told:
            await tell(client, session, turn)
        await tell(client, session, turns[-1], ends=True)
        await end(client, session)
    assert len(b.judge.requests) == 11
    outcomes = [(await b.turn(turn.turn_id)).outcome for turn in turns]
    assert outcomes == ["sampled"] * 11 + ["no_feedback"]
    assert len(b.rows("SELECT * FROM samples")) == 11
    assert b.rows("SELECT state FROM sessions") == [{"state": "closed"}]


async def test_what_was_stored_while_temporal_was_away_is_swept_and_judged(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation("one", "two", "three")
    session = await b.insert(*turns[:-1], replace(turns[-1], ends_session=True))
    notifier = TemporalNotifier(client, IDLE)
    sweeper = SweepActivities(PostgresSweepStore(b.database), notifier, b.work, IDLE, timedelta(0))
    async with at_work(client, b):
        assert (await sweeper.sweep()).turns == 3
        await end(client, session)
    outcomes = [(await b.turn(turn.turn_id)).outcome for turn in turns]
    assert outcomes == ["sampled", "sampled", "no_feedback"]


async def test_no_text_of_the_conversation_is_in_temporal_and_payloads_are_small(client: Client, bench: Bench) -> None:
    bench.judge.votes, bench.judge.hint = [-1], "SECRET hint of the judge, to be kept."
    turns = bench.conversation("SECRET question", "SECRET answer", "x" * 100_000)
    session = await bench.insert(*turns)
    handle = client.get_workflow_handle(names.session_workflow_id(session))
    async with at_work(client, bench):
        await tell(client, session, turns[0])
        await tell(client, session, turns[1])
        await until(lambda: bool(bench.rows("SELECT 1 FROM judgements WHERE hint LIKE 'SECRET%%'")))
        bench.judge.mode = "404"  # it repeats the question
        await tell(client, session, turns[2], ends=True)
        await end(client, session)
        history = await handle.fetch_history()
    # Not its JSON, in which payloads are base64: no text would be found there, whatever is stored.
    stored = b"".join(event.SerializeToString() for event in history.events)
    assert all(str(turn.turn_id).encode() in stored for turn in turns)
    assert b"SECRET" not in stored
    assert b"xxxxx" not in stored
    assert max(event.ByteSize() for event in history.events) < 4_000
    # Beginning and closing take 10; each turn at most 12.
    assert len(history.events) <= 10 + 12 * len(turns)
