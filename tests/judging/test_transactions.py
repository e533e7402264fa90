"""A judged turn takes fewer than six transactions, from the session's signal to the sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from db.database import Database
from tests.judging.conftest import Bench


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The transactions since the test last cleared this list."""
    counted: list[object] = []
    run = Database.run

    async def counting(self: Database, work: Callable[[AsyncConnection], Awaitable[Any]]) -> Any:
        counted.append(work)
        return await run(self, work)

    monkeypatch.setattr(Database, "run", counting)
    return counted


async def test_votes_and_hints_are_written_in_one_transaction_each(bench: Bench, transactions: list[object]) -> None:
    first, second = bench.conversation("Add two numbers.", "No, in Python.")
    session = await bench.insert(first, second)
    bench.judge.votes, bench.judge.hint = [-1], "Write it in Python, not in JavaScript."
    transactions.clear()

    (result,) = await bench.judge_turn(session, second)

    assert result.sample
    assert len(bench.rows("SELECT FROM votes")) == 3
    assert len(bench.rows("SELECT FROM hints")) == 3
    assert len(transactions) == 5  # contexts, judgement, votes, hints, decision with sample


async def test_a_turn_that_makes_nothing_judgeable_takes_one(bench: Bench, transactions: list[object]) -> None:
    (first,) = bench.conversation("Add two numbers.")
    session = await bench.insert(first)
    transactions.clear()

    assert await bench.judge_turn(session, first) == []

    assert len(transactions) == 1


async def test_one_unreadable_vote_costs_one_transaction_more(binary_bench: Bench, transactions: list[object]) -> None:
    bench = binary_bench
    first, second = bench.conversation("Add in Python.", "Thanks, great!")
    session = await bench.insert(first, second)
    bench.judge.votes = [1, "no vote", 1]
    transactions.clear()

    await bench.judge_turn(session, second)

    assert len(transactions) == 5  # contexts, judgement, two votes, the third, decision


async def test_unreadable_votes_and_hints_are_asked_for_and_written_again_at_once(
    bench: Bench, transactions: list[object]
) -> None:
    first, second = bench.conversation("Add two numbers.", "No, in Python.")
    session = await bench.insert(first, second)
    bench.judge.votes, bench.judge.hint = ["what?", "?", "!", -1], "Write it in Python, not in JavaScript."
    transactions.clear()

    (result,) = await bench.judge_turn(session, second)

    assert result.sample
    assert bench.rows("SELECT score FROM votes") == [{"score": -1}] * 3
    # None of the first answer's votes can be read; those of the second one are written at once.
    assert len(transactions) == 5
    assert [request["n"] for request in bench.judge.requests] == [3, 3, 3]
