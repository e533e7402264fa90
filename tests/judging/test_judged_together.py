"""Turns that are judged at the same time share transactions, with the results of turns judged one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.judging.judge_turn import JudgeTurns
from clawloop.core.contracts.turns import TurnOutcome, TurnRecord
from clawloop.core.errors import RecordUnusable, StoreUnavailable
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.judging.hints import NOT_ASKED
from clawloop.core.judging.records import (
    HINTS,
    VOTES,
    Ballot,
    FinalizedJudgement,
    JudgingContext,
    OpenJudgement,
    Relation,
)
from clawloop.core.judging.voting import Verdict, Vote
from clawloop.core.recipes.recipe import Gate
from db.database import Database
from db.invariants import violations
from db.serving.directory import ensure_policy
from tests.judging.conftest import BINARY, Bench, set_recipe, with_signal

JUDGED = """
    SELECT s.external_id, t.outcome, t.outcome_detail, j.verdict, j.expected, j.reward, j.verdict_why, j.hint_why,
        j.outcome AS judged, j.why, m.state, m.reason, m.reward AS term, m.hinted_prompts IS NULL AS without_hint,
        (SELECT count(*) FROM votes v WHERE v.judgement_id = j.id) AS votes,
        (SELECT count(*) FROM hints h WHERE h.judgement_id = j.id) AS hints
    FROM turns t JOIN sessions s ON s.id = t.session_id LEFT JOIN judgements j ON j.turn_id = t.id
        LEFT JOIN samples m ON m.judgement_id = j.id
    ORDER BY t.id
"""


async def sessions(bench: Bench, count: int, prefix: str = "s") -> list[tuple[SessionId, list[TurnRecord]]]:
    stored = []
    for number in range(count):
        turns = bench.conversation("one", "two", "three", session=f"{prefix}{number}")
        stored.append((await bench.insert(*turns), turns))
    return stored


async def opened(bench: Bench, turns: Sequence[TurnRecord]) -> OpenJudgement:
    return await bench.judgements.open(turns[0].turn_id, turns[1].turn_id, b"\1" * 32, HINTS)


def verdict(vote: Vote = 1, relation: Relation = Relation.NONE, ballot: Ballot | None = None) -> FinalizedJudgement:
    by_votes = Verdict(vote, float(vote), float(vote), "3 of 3")
    sampled = TurnOutcome.SAMPLED
    return FinalizedJudgement(by_votes, NOT_ASKED, None, float(vote), (), sampled, f"{vote:+d}", relation, ballot)


async def test_sessions_judged_at_once_are_judged_as_one_by_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.judge.votes, bench.judge.hint = [-1], "Say it in one line."
    transactions: list[object] = []
    run = Database.run

    async def counting(self: Database, work: Callable[[AsyncConnection], Awaitable[Any]]) -> Any:
        transactions.append(work)
        return await run(self, work)

    stored = await sessions(bench, 2)
    monkeypatch.setattr(Database, "run", counting)
    for session, turns in stored:
        for turn in turns:
            await bench.judge_turn(session, turn)
    alone = len(transactions)
    one_by_one = [row | {"external_id": ""} for row in bench.rows(JUDGED)][:3]
    stored = await sessions(bench, 8, "together")
    transactions.clear()
    together = [
        bench.judging.judge_turns(JudgeTurns(session_id=session, turn_ids=[turn.turn_id for turn in turns]))
        for session, turns in stored
    ]
    judged = await asyncio.gather(*together)

    assert [len(one.results) for one in judged] == [2] * 8
    rows = [row | {"external_id": ""} for row in bench.rows(JUDGED)][6:]
    assert rows == one_by_one * 8
    assert len(transactions) < 8 * (alone / 2) / 2  # half of what eight sessions need one by one
    assert await violations(bench.database) == []


async def test_a_turn_whose_row_is_locked_delays_no_other(bench: Bench) -> None:
    stored = await sessions(bench, 3)
    locked = stored[1][1][0].turn_id
    with psycopg.connect(bench.url) as other:
        other.execute("SELECT FROM turns WHERE id = %s FOR UPDATE", [locked])
        opening = [asyncio.create_task(opened(bench, turns)) for _, turns in stored]
        while sum(task.done() for task in opening) < 2:  # they share a transaction
            await asyncio.sleep(0.02)
        assert [task.done() for task in opening] == [True, False, True]
        assert all(isinstance(task.result(), OpenJudgement) for task in (opening[0], opening[2]))
        other.rollback()
        assert isinstance(await opening[1], OpenJudgement)


async def test_an_erased_turn_among_others_is_refused_alone(bench: Bench) -> None:
    stored = await sessions(bench, 3)
    bench.execute("UPDATE turns SET outcome = 'erased' WHERE id = %s", stored[1][1][0].turn_id)
    first, second, third = await asyncio.gather(*(opened(bench, turns) for _, turns in stored), return_exceptions=True)
    assert isinstance(first, OpenJudgement)
    assert isinstance(second, RecordUnusable)
    assert isinstance(third, OpenJudgement)


async def test_one_without_a_recipe_is_refused_alone(bench: Bench) -> None:
    stored = await sessions(bench, 2)
    await ensure_policy(bench.database, "bare", "tiny", [])
    bench.execute("UPDATE sessions SET policy = 'bare' WHERE id = %s", stored[0][0])
    first, second = await asyncio.gather(*(opened(bench, turns) for _, turns in stored), return_exceptions=True)
    assert str(first) == "policy 'bare' has no recipe"
    assert isinstance(second, OpenJudgement)


async def test_one_turn_opened_twice_at_once_has_one_judgement(bench: Bench) -> None:
    ((_, turns),) = await sessions(bench, 1)
    first, second = await asyncio.gather(opened(bench, turns), opened(bench, turns))
    assert first.id == second.id


async def test_answers_that_nobody_can_read_are_stored_together(bench: Bench) -> None:
    judgements = [await opened(bench, turns) for _, turns in await sessions(bench, 2)]
    store = bench.judgements
    await asyncio.gather(*(store.store_votes(one.id, [(0, "what?", None)]) for one in judgements))
    await asyncio.gather(*(store.store_hints(one.id, HINTS, [(0, "what?", None)]) for one in judgements))
    assert bench.rows("SELECT raw, score FROM votes") == [{"raw": "what?", "score": None}] * 2
    assert bench.rows("SELECT raw, accepted, text FROM hints") == [{"raw": "what?", "accepted": None, "text": None}] * 2


async def test_a_verdict_that_is_outdated_fails_alone(bench: Bench) -> None:
    judgements = [await opened(bench, turns) for _, turns in await sessions(bench, 3)]
    await bench.judgements.store_votes(judgements[0].id, [(0, "1", 1)])
    await bench.judgements.store_votes(judgements[1].id, [(0, "-1", -1)])
    ballot = Ballot(VOTES, (1,))
    finals = [verdict(ballot=ballot), verdict(ballot=ballot), verdict()]
    answers = await asyncio.gather(
        *(bench.judgements.finalize(one.id, final, []) for one, final in zip(judgements, finals, strict=True)),
        return_exceptions=True,
    )
    assert isinstance(answers[1], StoreUnavailable)
    assert [answers[0], answers[2]] == [None, None]
    states = "SELECT judgement_id FROM samples WHERE state = 'fresh'"
    assert {row["judgement_id"] for row in bench.rows(states)} == {judgements[0].id, judgements[2].id}


async def test_held_out_turns_among_others_are_held_out(bench: Bench) -> None:
    await set_recipe(bench, BINARY.model_copy(update={"gate": Gate(held_out=0.5)}))
    judgements = [await opened(bench, turns) for _, turns in await sessions(bench, 24)]
    await asyncio.gather(*(bench.judgements.finalize(one.id, verdict(), []) for one in judgements))
    rows = bench.rows(
        "SELECT s.state, t.outcome, count(*) AS n FROM samples s JOIN turns t ON t.id = s.turn_id GROUP BY 1, 2"
    )
    # Each session is held out or not with even odds, by its id: all 24 of one kind would be one run in eight million.
    assert {(row["state"], row["outcome"]) for row in rows} == {("fresh", "sampled"), ("held_out", "held_out")}
    assert sum(row["n"] for row in rows) == 24


async def test_each_is_measured_against_the_mean_of_those_before(bench: Bench) -> None:
    await set_recipe(bench, with_signal(baseline="mean"))
    judgements = [await opened(bench, turns) for _, turns in await sessions(bench, 3)]
    votes: list[Vote] = [1, -1, 1]
    finals = [verdict(vote, Relation.MEAN) for vote in votes]
    await asyncio.gather(
        *(bench.judgements.finalize(one.id, final, []) for one, final in zip(judgements, finals, strict=True))
    )
    terms = "SELECT m.reward, m.reason, j.reward AS own FROM samples m JOIN judgements j ON j.id = m.judgement_id"
    assert bench.rows(f"{terms} ORDER BY j.id") == [
        {"reward": 1.0, "reason": "+1", "own": 1.0},
        {"reward": -2.0, "reason": "-1; mean before +1.00", "own": -1.0},
        {"reward": 1.0, "reason": "+1; mean before +0.00", "own": 1.0},
    ]
    assert bench.rows("SELECT verdict_count, verdict_total FROM policies") == [{"verdict_count": 3, "verdict_total": 1}]


async def test_the_call_that_fills_a_batch_names_its_policy(bench: Bench) -> None:
    samples = BINARY.train.batch_samples
    await set_recipe(bench, BINARY)
    judgements = [await opened(bench, turns) for _, turns in await sessions(bench, samples)]
    ready = await asyncio.gather(*(bench.judgements.finalize(one.id, verdict(), []) for one in judgements))
    assert sorted(map(str, ready)) == ["None"] * (samples - 1) + ["default"]
    assert bench.rows("SELECT work_waiting FROM policies") == [{"work_waiting": True}]


async def test_a_judgement_finalized_twice_has_one_sample(bench: Bench) -> None:
    ((_, turns),) = await sessions(bench, 1)
    judgement = await opened(bench, turns)
    await asyncio.gather(*(bench.judgements.finalize(judgement.id, verdict(), []) for _ in range(3)))
    assert len(bench.rows("SELECT FROM samples")) == 1


async def test_unknown_turns_among_others_are_unknown(bench: Bench) -> None:
    ((_, turns),) = await sessions(bench, 1)
    loaded = await asyncio.gather(
        bench.judgements.load_judging(turns[1].turn_id, 5),
        bench.judgements.load_judging(TurnId(UUID(int=1)), 5),
        bench.judgements.load_judging(turns[0].turn_id, 5),
    )
    assert loaded[1] is None
    assert loaded[0] is not None
    assert loaded[0].before == (await bench.judgements.load_context(turns[0].turn_id))
    assert loaded[2] is not None
    assert loaded[2].before is None


async def test_two_requests_that_make_one_turn_judgeable_ask_for_its_votes_once(
    binary_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = binary_bench
    first, second, third = bench.conversation("one", "two", "three")
    # The second turn comes late, from a gateway's disk, and both it and the third make it judgeable then.
    session = await bench.insert(first, third)
    await bench.insert(second)
    loaded: list[TurnId] = []
    load = bench.judgements.load_judging

    async def loading(turn_id: TurnId, limit: int) -> JudgingContext | None:
        context = await load(turn_id, limit)
        loaded.append(turn_id)
        return context

    monkeypatch.setattr(bench.judgements, "load_judging", loading)
    bench.judge.gate.clear()
    late = JudgeTurns(session_id=session, turn_ids=[second.turn_id, third.turn_id])
    both = [asyncio.create_task(bench.judging.judge_turns(late)) for _ in range(2)]
    while len(bench.judge.requests) < 2 or len(loaded) < 4:  # about the first turn and the second; all know no vote
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # whoever would ask has asked
    bench.judge.gate.set()
    judged = await asyncio.gather(*both)

    assert len(bench.judge.requests) == 2
    assert [sorted(result.turn_id for result in one.results) for one in judged] == [[first.turn_id, second.turn_id]] * 2
    assert await violations(bench.database) == []
