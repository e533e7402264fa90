"""The end of a run with faults notices a judgement that never comes, and a session that does not close."""

from __future__ import annotations

import asyncio

import pytest

from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from db.invariants import violations
from tests.chaos.judged import followed_turns, judged_turns, lost_judgements, sessions_left_open
from tests.judging.conftest import Bench, bench, binary_bench, judge

__all__ = ["bench", "binary_bench", "judge"]

pytestmark = pytest.mark.usefixtures("binary_bench")


async def test_a_followed_turn_whose_judging_is_lost_is_named_and_the_newest_one_is_not(bench: Bench) -> None:
    turns = bench.conversation("one", "two", "three")
    session = await bench.insert(*turns)
    await bench.judge_turn(session, turns[1])
    bench.execute("UPDATE turns SET announced_at = now() - interval '1 hour'")
    assert await violations(bench.database) == []  # what `clawloop check` sees of it
    (lost,) = await lost_judgements(bench.url, within_seconds=0)
    assert lost.startswith(f"turn {turns[1].turn_id} of session {session} is waiting: 1 main turns follow it")
    assert lost.endswith(", which its workflow was told")
    bench.execute("UPDATE turns SET announced_at = NULL")
    (lost,) = await lost_judgements(bench.url, within_seconds=0)
    assert lost.endswith("none of which its workflow was told")
    await bench.judge_turn(session, turns[2])
    assert await lost_judgements(bench.url, within_seconds=0) == []
    assert await judged_turns(bench.url) == 2


@pytest.mark.parametrize("outcome", [TurnOutcome.UNJUDGED, TurnOutcome.NO_FEEDBACK])
async def test_a_followed_turn_that_a_closing_session_decided_without_a_judge_is_named(
    bench: Bench, outcome: TurnOutcome
) -> None:
    turns = bench.conversation("one", "two")
    session = await bench.insert(*turns)
    bench.execute("UPDATE turns SET outcome = %s WHERE id = %s", outcome, turns[0].turn_id)
    (lost,) = await lost_judgements(bench.url)
    assert lost.startswith(f"turn {turns[0].turn_id} of session {session} is {outcome}: 1 main turns follow it")
    assert await judged_turns(bench.url) == 0
    assert await followed_turns(bench.url) == {outcome: 1}


async def test_a_judgement_that_is_under_way_is_waited_for(bench: Bench) -> None:
    turns = bench.conversation("one", "two")
    session = await bench.insert(*turns)
    looking = asyncio.create_task(lost_judgements(bench.url, within_seconds=60))
    await asyncio.sleep(0.5)
    assert not looking.done()
    await bench.judge_turn(session, turns[1])
    assert await looking == []


async def test_a_turn_that_only_a_side_turn_follows_may_wait(bench: Bench) -> None:
    turns = bench.conversation("one", "two")
    await bench.insert(*turns)
    bench.execute("UPDATE turns SET kind = %s WHERE id = %s", TurnKind.SIDE, turns[1].turn_id)
    assert await lost_judgements(bench.url, within_seconds=0) == []


async def test_an_ended_session_that_is_open_or_not_stored_is_named(bench: Bench) -> None:
    session = await bench.insert(*bench.conversation("one", session="s1-0"))
    await bench.insert(*bench.conversation("one", session="s2"))
    left = await sessions_left_open(bench.url, ["s1-0", "s1-1"], within_seconds=0)
    assert left == [
        f"session {session} (s1-0) was ended by its client, and is open; last turn: waiting, its workflow was not told",
        "session None (s1-1) was ended by its client, and is not stored; last turn: None, its workflow was not told",
    ]
    await bench.close(session)
    assert await sessions_left_open(bench.url, ["s1-0"], within_seconds=0) == []
