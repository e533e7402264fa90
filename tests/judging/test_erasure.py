"""After an erasure PostgreSQL holds none of the text, consistent rows, and no late answer of a judge."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from clawloop.core.contracts.turns import (
    Message,
    SessionEvidence,
    SessionSource,
    TurnKind,
    TurnOutcome,
    TurnRecord,
    TurnStatus,
)
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import SessionId, new_turn_id
from clawloop.core.judging.hints import NOT_ASKED, HintChoice
from clawloop.core.judging.records import FinalizedJudgement
from clawloop.core.judging.voting import HintVote, Verdict
from db.erasure import PostgresErasureStore
from db.invariants import violations
from db.tables import Base
from tests.contract.ledgers import train
from tests.judging.conftest import Bench

WORD = "zebra"
IDS = [0x7A65, 0x6272, 0x61]  # in no other array
GOOD = FinalizedJudgement(Verdict(1, 1.0, 1.0, "3 of 3"), NOT_ASKED, None, 1.0, (), TurnOutcome.SAMPLED, "verdict +1")


def says(body: dict[str, Any], question: str) -> str:
    mark = re.findall(r"<(?:task|reply) ([0-9a-f]{6}) ", question)[0]
    if str(body["messages"][0]["content"]).startswith("You find out"):
        return f"hint {mark}: Say that a {WORD} has stripes next time."
    return f"The {WORD} is well.\nverdict {mark}: 1"


async def judged(bench: Bench) -> tuple[SessionId, list[TurnRecord]]:
    """A session whose every text column holds the word: three main turns, a side turn, a failed one."""
    bench.judge.says = says
    turns = bench.conversation(
        f"one {WORD}", f"two {WORD}", f"three {WORD}", session=f"{WORD}-1", tools=[{"function": {"name": WORD}}]
    )
    turns = [replace(turn, prompt_ids=[1, 2, 3], response_ids=IDS, logprobs=[-1.0] * 3) for turn in turns]
    evidence = SessionEvidence(SessionSource.HEADER, f"{WORD}-1", (WORD,))
    turns = [replace(turn, evidence=evidence, sampling=turn.sampling | {"stop": WORD}) for turn in turns]
    side = replace(turns[-1], turn_id=new_turn_id(), kind=TurnKind.SIDE, kind_reason=f"X-Turn-Type: {WORD}")
    failed = replace(
        turns[-1],
        turn_id=new_turn_id(),
        status=TurnStatus.ERROR,
        error=f"no {WORD}",
        response=None,
        response_ids=None,
        logprobs=None,
        prompt_ids=None,
    )
    session = await bench.insert(*turns, side, failed)
    for turn in turns[1:]:
        await bench.judge_turn(session, turn)
    bench.feedback(turns[2], None, f"What a {WORD}!")
    given = bench.feedback(turns[1], -1.0, f"No {WORD}.")
    await bench.judge_turn(session, turns[1], feedback_id=given)
    return session, turns


def holding_words(bench: Bench) -> list[tuple[str, dict[str, Any]]]:
    """Rows of all tables that hold the word or the token ids."""
    raw = b"".join(token.to_bytes(4, "little") for token in IDS).hex()
    found = []
    for table in Base.metadata.tables:
        query = f"SELECT t::text AS row FROM {table} t WHERE strpos(t::text, %s) > 0 OR strpos(t::text, %s) > 0"
        found += [(table, row) for row in bench.rows(query, WORD, raw)]
    return found


async def erase(bench: Bench, session: SessionId) -> Any:
    erasure = await PostgresErasureStore(bench.database).erase_session(session)
    assert erasure is not None
    return erasure


async def test_no_row_of_any_table_holds_any_text_and_the_ledger_is_consistent(bench: Bench) -> None:
    session, turns = await judged(bench)
    before = {table for table, _ in holding_words(bench)}
    assert before >= {"sessions", "turns", "tool_lists", "judgements", "votes", "hints", "feedback"}
    states = bench.rows("SELECT state FROM samples ORDER BY id")
    assert [row["state"] for row in states] == ["fresh", "fresh"]
    erasure = await erase(bench, session)
    assert (erasure.turns, erasure.expired) == (5, 2)
    assert holding_words(bench) == []
    assert await violations(bench.database) == []
    assert bench.rows("SELECT DISTINCT state, reason FROM samples") == [{"state": "expired", "reason": "erased"}]
    assert bench.rows("SELECT DISTINCT outcome, outcome_detail FROM turns") == [
        {"outcome": "erased", "outcome_detail": "erased"}
    ]
    (row,) = bench.rows("SELECT state, closed_why, external_id FROM sessions")
    assert row == {"state": "closed", "closed_why": "erased", "external_id": None}
    (event,) = bench.rows("SELECT kind, detail FROM events")
    assert (event["kind"], event["detail"]["turns"]) == ("erased", 5)
    assert (await bench.turn(turns[0].turn_id)).record.messages == []  # nor is it in a cache


async def test_a_sample_that_a_step_has_keeps_its_place_but_is_not_trained_again(bench: Bench) -> None:
    session, turns = await judged(bench)
    train(bench.url, turns[0].turn_id, 4)
    bench.execute("INSERT INTO versions (policy, n, parent, path, sha256) VALUES ('default', 4, 0, 'v4', '')")
    bench.execute("UPDATE samples SET state = 'claimed' WHERE state = 'fresh'")
    bench.execute(
        """INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash)
        SELECT id, 6, 0, 0, 'claimed', recipe_hash FROM policies"""
    )
    bench.execute(
        """INSERT INTO step_samples (policy, step, sample_id, place)
        SELECT policy, 6, id, 0 FROM samples WHERE state = 'claimed'"""
    )
    erasure = await erase(bench, session)
    assert (erasure.expired, erasure.learned) == (0, 2)
    assert [row["state"] for row in bench.rows("SELECT state FROM samples ORDER BY id")] == ["trained", "claimed"]
    assert holding_words(bench) == []
    assert await violations(bench.database) == []


async def test_a_late_answer_of_a_judge_is_not_stored(binary_bench: Bench) -> None:
    b = binary_bench
    first, second = b.conversation("one", "two")
    session = await b.insert(first, second)
    opened = await b.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await erase(b, session)
    await b.judgements.store_votes(opened.id, [(0, f"The {WORD}", 1)])
    await b.judgements.store_direct_vote(opened.id, {1: -0.1, 0: -3.0, -1: -4.0}, 1)
    await b.judgements.store_hints(opened.id, "hint", [(0, f"The {WORD}", HintVote(True, WORD))])
    with pytest.raises(RecordUnusable, match="was erased"):
        await b.judgements.finalize(opened.id, GOOD, [])
    with pytest.raises(RecordUnusable, match="was erased"):
        await b.judgements.revise(first.turn_id, None, b"e", "hint")
    assert [b.rows(f"SELECT * FROM {table}") for table in ("votes", "hints", "samples")] == [[], [], []]
    assert holding_words(b) == []
    # The workflow retries once without asking a judge, and gets the result.
    (result,) = await b.judge_turn(session, first, itself=True, give_up="RecordUnusable")
    assert (result.outcome, result.why) == (TurnOutcome.ERASED, "erased")
    assert b.judge.requests == []


async def test_erasing_a_turn_while_a_judge_reads_it_leaves_the_turn_before_unchanged(bench: Bench) -> None:
    first, second = bench.conversation("one", f"two {WORD}")
    session = await bench.insert(first, second)
    opened = await bench.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await PostgresErasureStore(bench.database).erase_turn(second.turn_id)
    await bench.judgements.store_votes(opened.id, [(0, f"The {WORD}", 1)])
    await bench.judgements.store_direct_vote(opened.id, {1: -0.1, 0: -3.0, -1: -4.0}, 1)
    await bench.judgements.store_hints(opened.id, "hint", [(0, f"The {WORD}", HintVote(True, WORD))])
    with pytest.raises(RecordUnusable, match="was erased"):
        await bench.judgements.finalize(opened.id, replace(GOOD, hint=HintChoice((WORD,), True, "1 of 1")), [])
    assert holding_words(bench) == []
    assert await bench.judge_turn(session, second, give_up="RecordUnusable") == []
    assert (await bench.turn(first.turn_id)).outcome is TurnOutcome.WAITING
    assert bench.judge.requests == []


async def test_the_next_state_after_an_erased_one_gets_new_votes(binary_bench: Bench) -> None:
    b = binary_bench
    first, second = b.conversation("one", "two")
    session = await b.insert(first, second)
    opened = await b.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await b.judgements.store_votes(opened.id, [(0, "verdict: -1", -1)])
    await b.judgements.store_hints(opened.id, "hint", [(0, "unreadable", None)])
    await PostgresErasureStore(b.database).erase_turn(second.turn_id)
    assert [b.rows(f"SELECT * FROM {table}") for table in ("judgements", "votes", "hints")] == [[], [], []]
    answered: Message = {"role": "assistant", "content": "answer 0 of s"}
    said: Message = {"role": "user", "content": "other"}
    messages = [*first.messages, answered, said]
    followed = replace(second, turn_id=new_turn_id(), messages=messages, started_at=datetime.now(UTC))
    await b.insert(followed)
    b.judge.votes = [1]
    (result,) = await b.judge_turn(session, followed)
    assert result.why == "verdict good: 3 of 3 votes good"
    assert [vote["score"] for vote in b.rows("SELECT score FROM votes")] == [1, 1, 1]


async def test_a_verdict_by_an_erased_turn_stays_without_any_of_its_text(bench: Bench) -> None:
    bench.judge.hint = f"Say that a {WORD} has stripes next time."
    first, second = bench.conversation("one", f"two {WORD}")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    assert "hints" in {table for table, _ in holding_words(bench)}
    await PostgresErasureStore(bench.database).erase_turn(second.turn_id)
    assert holding_words(bench) == []
    turn = await bench.turn(first.turn_id)
    assert (turn.outcome, turn.outcome_detail) == (TurnOutcome.EXPIRED, "what followed it was erased")
    assert turn.record == first
    assert bench.rows("SELECT verdict FROM judgements") == [{"verdict": 1}]
    assert await violations(bench.database) == []


async def test_a_hint_of_an_erased_turn_that_a_step_has_is_counted_as_learned(bench: Bench) -> None:
    bench.judge.hint = f"Say that a {WORD} has stripes next time."
    first, second = bench.conversation("one", f"two {WORD}")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    train(bench.url, first.turn_id, 4)
    erasure = await PostgresErasureStore(bench.database).erase_turn(second.turn_id)
    assert erasure is not None
    assert (erasure.turns, erasure.expired, erasure.learned) == (1, 0, 1)


async def test_a_sample_without_a_hint_stays_when_its_next_state_is_erased(binary_bench: Bench) -> None:
    b = binary_bench
    first, second = b.conversation("one", f"two {WORD}")
    session = await b.insert(first, second)
    await b.judge_turn(session, second)
    await PostgresErasureStore(b.database).erase_turn(second.turn_id)
    assert b.rows("SELECT state FROM samples") == [{"state": "fresh"}]
    assert holding_words(b) == []


@pytest.mark.parametrize("whole", [True, False], ids=["session", "turn"])
async def test_a_turn_is_erased_by_its_state_after_the_locks_are_held(bench: Bench, whole: bool) -> None:
    (turn,) = bench.conversation("one")
    session = await bench.insert(turn)
    store = PostgresErasureStore(bench.database)
    with psycopg.connect(bench.url) as claiming:
        claiming.execute("SELECT FROM policies FOR UPDATE")
        erasing = asyncio.create_task(store.erase_session(session) if whole else store.erase_turn(turn.turn_id))
        while not bench.rows("SELECT FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)
        began = datetime.now(UTC)
    await erasing
    (row,) = bench.rows(f"SELECT erased_at FROM {'sessions' if whole else 'turns'}")
    assert row["erased_at"] > began


async def test_an_erasure_locks_no_turn_while_it_waits_for_the_turn_before(bench: Bench) -> None:
    bench.judge.hint = "Say that it has stripes next time."
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    assert bench.rows("SELECT FROM samples WHERE hinted_prompts IS NOT NULL")
    hold = "SELECT id FROM turns WHERE id = %s FOR"
    with psycopg.connect(bench.url) as judging:  # as an activity that opens a judgement, which names the turn after
        judging.execute(f"{hold} UPDATE", [first.turn_id])
        erasing = asyncio.create_task(PostgresErasureStore(bench.database).erase_turn(second.turn_id))
        while not bench.rows("SELECT FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)
        free = judging.execute(f"{hold} KEY SHARE SKIP LOCKED", [second.turn_id]).fetchall()
    erasure = await erasing
    assert free == [(second.turn_id,)]
    assert erasure is not None
    assert (erasure.turns, erasure.expired) == (1, 1)


async def test_tools_that_other_turns_use_stay(bench: Bench) -> None:
    tools = [{"function": {"name": WORD}}]
    (mine,) = bench.conversation("one", session="mine", tools=tools)
    (other,) = bench.conversation("one", session="other", tools=tools)
    session, others = await bench.insert(mine), await bench.insert(other)
    await erase(bench, session)
    assert (await bench.turn(other.turn_id)).record.tools == tools
    await erase(bench, others)
    assert bench.rows("SELECT * FROM tool_lists") == []


async def test_a_batch_that_is_erased_no_longer_waits(binary_bench: Bench) -> None:
    b = binary_bench
    first, second = b.conversation("one", "two")
    session = await b.insert(first, second)
    await b.judge_turn(session, second)
    b.execute("UPDATE samples SET created_at = now() - interval '2 days'")
    b.execute("UPDATE policies SET work_waiting = true")
    await erase(b, session)
    assert b.rows("SELECT work_waiting FROM policies") == [{"work_waiting": False}]


async def test_a_closing_after_an_erasure_has_nothing_to_do(bench: Bench) -> None:
    session, _ = await judged(bench)
    asked = len(bench.judge.requests)
    await erase(bench, session)
    closed = await bench.close(session, "erased")
    assert (closed.to_judge, closed.to_ask, closed.results) == ([], [], [])
    assert len(bench.judge.requests) == asked
    (row,) = bench.rows("SELECT state, closed_why, guarantee FROM sessions")
    assert row == {"state": "closed", "closed_why": "erased", "guarantee": "no sample: erased"}
