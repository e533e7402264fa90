"""Benchmarks measure judgements by votes, and a judge that answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from benchmarks import judging, stub_judge
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import Recipe
from tests.fakes.engine import serving
from tests.judging.conftest import BINARY, JUDGE_SECONDS, Bench, with_client

HINTED = Recipe(name="combined")


@pytest.fixture
async def connection(bench: Bench) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection[Any].connect(bench.url, autocommit=True) as opened:
        yield opened


async def test_all_answers_of_the_stub_judge_can_be_read(
    bench: Bench, connection: psycopg.AsyncConnection[Any]
) -> None:
    first, second = bench.conversation("Add two numbers.", "Thanks, great!")
    session = await bench.insert(first, second)
    async with serving(stub_judge.app) as url, with_client(bench, AnswerForm.FREE, JUDGE_SECONDS, url=url) as asking:
        await asking.judge_turn(session, second)
    assert [vote["score"] for vote in bench.rows("SELECT score FROM votes")] == [1, 1, 1]
    assert [hint["accepted"] for hint in bench.rows("SELECT accepted FROM hints")] == [False] * 3
    await judging._judged(connection, [first.turn_id], pause=0.01)
    await judging._require_answers(connection, HINTED)


async def test_a_turn_that_ends_unjudged_is_no_judged_turn(
    bench: Bench, connection: psycopg.AsyncConnection[Any]
) -> None:
    first, second = bench.conversation("Add two numbers.", "Thanks, great!")
    session = await bench.insert(first, second)
    bench.judge.votes = ["nonsense"]
    await bench.judge_turn(session, second)
    with pytest.raises(RuntimeError, match=f"turn {first.turn_id} was decided without a vote .*: no valid vote"):
        await judging._judged(connection, [first.turn_id], pause=0.01)
    with pytest.raises(RuntimeError, match="1 judgements were decided without a vote"):
        await judging._require_answers(connection, HINTED)


async def test_hint_answers_that_cannot_be_read_end_the_benchmark_where_its_recipe_asks_for_hints(
    bench: Bench, connection: psycopg.AsyncConnection[Any]
) -> None:
    first, second = bench.conversation("Add two numbers.", "Thanks, great!")
    session = await bench.insert(first, second)
    bench.judge.says = lambda body, question: (
        f"verdict {question.split()[1]}: 1" if "verdict" in question.splitlines()[-1] else "no hint"
    )
    await bench.judge_turn(session, second)
    await judging._judged(connection, [first.turn_id], pause=0.01)
    await judging._require_answers(connection, BINARY)
    with pytest.raises(RuntimeError, match="3 of the judge's answers about hints cannot be read, 0 judgements have no"):
        await judging._require_answers(connection, HINTED)
    bench.execute("DELETE FROM hints")
    with pytest.raises(RuntimeError, match="0 of the judge's answers about hints cannot be read, 1 judgements have no"):
        await judging._require_answers(connection, HINTED)
