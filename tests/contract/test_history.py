"""Stores of compared verdicts: each turn once a comparison, and what differs until it is applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pytest

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import TurnId, new_feedback_id, new_turn_id
from clawloop.core.judging.agreement import Pair
from clawloop.core.judging.hints import HintChoice
from clawloop.core.judging.records import FinalizedJudgement
from clawloop.core.judging.voting import Verdict, Vote
from clawloop.operations.history import HistoryKey, HistoryStore, HistoryTurn, NewVerdict
from db.episodes.groups import PostgresEpisodeStore
from db.judging.rejudging import PostgresHistoryStore
from tests.contract.episodes import LIFETIME, new_group
from tests.contract.learning import POLICY, PostgresLearning
from tests.fakes.history_store import FakeHistoryStore

KEY = HistoryKey(POLICY, "hash", "judge")


class Bench(Protocol):
    """Three turns with the verdict 1, and what happens to them beside the comparison."""

    @property
    def store(self) -> HistoryStore: ...

    async def judge_again(self, turn: TurnId, verdict: Vote) -> None: ...

    async def rate(self, turn: TurnId) -> None: ...

    async def give_to_episode(self, turn: TurnId) -> None:
        """As if it had always been an episode's."""


@dataclass
class FakeBench:
    store: FakeHistoryStore

    async def judge_again(self, turn: TurnId, verdict: Vote) -> None:
        self.store.judge_again(turn, verdict)

    async def rate(self, turn: TurnId) -> None:
        self.store.rate(turn)

    async def give_to_episode(self, turn: TurnId) -> None:
        self.store.of_episodes.add(turn)


@dataclass
class PostgresBench:
    store: PostgresHistoryStore
    learning: PostgresLearning

    async def judge_again(self, turn: TurnId, verdict: Vote) -> None:
        judgements = self.learning.judgements
        opened = await judgements.open(turn, None, b"evidence", "hint", revision=1)
        finalized = FinalizedJudgement(
            verdict=Verdict(verdict, float(verdict), float(verdict), "3 of 3 votes"),
            hint=HintChoice(None, answered=True, why="none"),
            not_trainable=None,
            reward=float(verdict),
            hinted_prompt_ids=None,
            outcome=TurnOutcome.SAMPLED,
            why=f"verdict {verdict}",
        )
        await judgements.finalize(opened.id, finalized, [])

    async def rate(self, turn: TurnId) -> None:
        insert = "INSERT INTO feedback (id, turn_id, api_key_id, score, effect) VALUES (%s, %s, %s, 1, 'amends')"
        await self.learning.execute(insert, new_feedback_id(), turn, self.learning.key)

    async def give_to_episode(self, turn: TurnId) -> None:
        episodes, group = PostgresEpisodeStore(self.learning.database), new_group(2)
        await episodes.make_group(group)
        episode = await episodes.begin_episode(group.id, 0, 1, LIFETIME)
        await self.learning.execute("UPDATE turns SET episode_id = %s WHERE id = %s", episode.id, turn)


@pytest.fixture
async def postgres_history(postgres_learning: PostgresLearning) -> Bench:
    await postgres_learning.add_samples(3)
    return PostgresBench(PostgresHistoryStore(postgres_learning.database), postgres_learning)


@pytest.fixture
def fake_history() -> Bench:
    return FakeBench(FakeHistoryStore([HistoryTurn(new_turn_id(), 0, 1) for _ in range(3)]))


@pytest.fixture(params=["fake", "postgres"])
def bench(request: pytest.FixtureRequest) -> Bench:
    bench: Bench = request.getfixturevalue(f"{request.param}_history")
    return bench


@pytest.fixture
def store(bench: Bench) -> HistoryStore:
    """Three judged turns."""
    return bench.store


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


async def test_what_was_rated_or_judged_again_since_is_left_as_it_is(bench: Bench) -> None:
    first, second, third = await bench.store.next_turns(KEY, 3)
    for turn in (first, second, third):
        await bench.store.record(KEY, turn, NewVerdict(-turn.verdict, "differs"))
    await bench.rate(first.turn_id)
    assert await bench.store.differing(KEY) == [second.turn_id, third.turn_id]
    await bench.judge_again(second.turn_id, 1)
    assert await bench.store.differing(KEY) == [third.turn_id]
    await bench.judge_again(third.turn_id, -1)
    assert await bench.store.differing(KEY) == []


async def test_a_verdict_that_changed_while_the_other_judge_was_asked_is_left_as_it_is(bench: Bench) -> None:
    (first, *_) = await bench.store.next_turns(KEY, 3)
    await bench.judge_again(first.turn_id, -1)
    await bench.store.record(KEY, first, NewVerdict(-first.verdict, "agrees with the new one"))
    assert await bench.store.differing(KEY) == []


async def test_turns_of_episodes_are_not_compared_as_nobody_can_have_them_judged_again(bench: Bench) -> None:
    first, second, third = await bench.store.next_turns(KEY, 3)
    await bench.store.record(KEY, first, NewVerdict(-first.verdict, "differs"))
    await bench.store.record(KEY, second, NewVerdict(second.verdict, "agrees"))
    for turn in (first, third):
        await bench.give_to_episode(turn.turn_id)
    assert (await bench.store.next_turns(KEY, 10), await bench.store.left(KEY)) == ([], 0)
    assert await bench.store.pairs(KEY) == [Pair(0, second.verdict, second.verdict)]
    assert await bench.store.differing(KEY) == []
