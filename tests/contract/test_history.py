"""Stores of compared verdicts: each turn once a comparison, and what differs until it is applied."""

from __future__ import annotations

import pytest

from clawloop.ids import new_turn_id
from clawloop.judging.agreement import Pair
from clawloop.operations.history import HistoryKey, HistoryStore, HistoryTurn, NewVerdict
from db.judging.history import PostgresHistoryStore
from tests.contract.learning import POLICY, PostgresLearning
from tests.fakes.history_store import FakeHistoryStore

KEY = HistoryKey(POLICY, "hash", "judge")


@pytest.fixture
async def postgres_history(postgres_learning: PostgresLearning) -> HistoryStore:
    await postgres_learning.add_samples(3)
    return PostgresHistoryStore(postgres_learning.database)


@pytest.fixture
def fake_history() -> HistoryStore:
    return FakeHistoryStore([HistoryTurn(new_turn_id(), 0, 1) for _ in range(3)])


@pytest.fixture(params=["fake", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest) -> HistoryStore:
    """Three judged turns."""
    store: HistoryStore = request.getfixturevalue(f"{request.param}_history")
    return store


async def test_each_turn_is_compared_once(store: HistoryStore) -> None:
    first, second, third = await store.next_turns(KEY, 10)
    assert {first.verdict, second.verdict, third.verdict} <= {-1, 0, 1}
    assert [turn.turn_id for turn in await store.next_turns(KEY, 2)] == [first.turn_id, second.turn_id]
    await store.record(KEY, first, NewVerdict(-first.verdict, "differs"))
    await store.record(KEY, first, NewVerdict(first.verdict, "comes too late"))
    await store.record(KEY, second, NewVerdict(second.verdict, "agrees"))
    assert await store.left(KEY) == 1
    assert await store.next_turns(KEY, 10) == [third]
    pairs = [Pair(0, first.verdict, -first.verdict), Pair(0, second.verdict, second.verdict)]
    assert sorted(map(str, await store.pairs(KEY))) == sorted(map(str, pairs))


async def test_another_judge_and_another_recipe_are_other_comparisons(store: HistoryStore) -> None:
    (first, *_) = await store.next_turns(KEY, 1)
    await store.record(KEY, first, NewVerdict(1, "x"))
    for other in (HistoryKey(POLICY, "hash", "another"), HistoryKey(POLICY, "other", "judge")):
        assert (await store.left(other), await store.pairs(other)) == (3, [])


async def test_what_differs_is_listed_until_it_is_applied(store: HistoryStore) -> None:
    first, second, third = await store.next_turns(KEY, 3)
    await store.record(KEY, first, NewVerdict(-first.verdict, "differs"))
    await store.record(KEY, second, NewVerdict(None, "no valid vote"))
    await store.record(KEY, third, NewVerdict(-third.verdict, "differs"))
    assert await store.differing(KEY) == [first.turn_id, third.turn_id]
    await store.mark_applied(KEY, [first.turn_id])
    assert await store.differing(KEY) == [third.turn_id]
