"""Votes on the turns of episodes, from the judge to the settled group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta

import pytest

from activities.judging.episode_votes import EpisodeJudgingActivities, JudgeEpisode
from clawloop.core.contracts.episodes import Ending, EpisodeBegun, EpisodeEnd, EpisodeScore, GroupState, NewGroup
from clawloop.core.errors import NotFound
from clawloop.core.ids import ApiKeyId, new_rollout_group_id
from clawloop.core.judging.prompts import AnswerForm
from clawloop.operations.history import judge_precision
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from db.episodes.groups import PostgresEpisodeStore
from db.invariants import violations
from db.judging.rejudging import PostgresVoteReader
from tests.judging.conftest import JUDGE_SECONDS, Bench, set_recipe, with_signal

TURNS = ("What is 2 plus 2?", "It printed 4", "Say it")


async def begin(bench: Bench, size: int) -> tuple[NewGroup, list[EpisodeBegun]]:
    """A group whose episodes have three turns each, and wait to be verified."""
    store = PostgresEpisodeStore(bench.database)
    group = NewGroup(new_rollout_group_id(), "default", "tool-call", "train-0", size)
    await store.make_group(group)
    episodes = [await store.begin_episode(group.id, place, 1, timedelta(hours=1)) for place in range(size)]
    for episode in episodes:
        for turn in bench.conversation(*TURNS, session=str(episode.id)):
            await bench.insert(replace(turn, api_key_id=ApiKeyId(episode.id), episode_id=episode.id))
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
    return group, episodes


async def judge(bench: Bench, episodes: Sequence[EpisodeBegun], votes: Sequence[int]) -> list[tuple[int, int]]:
    """Judge each episode by a judge that always votes so; the number of its turns, and of those judged."""
    async with JudgeClient(lambda _: [Endpoint(bench.judge.url, "tiny")], AnswerForm.FREE, seconds=JUDGE_SECONDS) as by:
        store = PostgresEpisodeStore(bench.database)
        activities = EpisodeJudgingActivities(
            bench.judgements, store.waiting_turns, store.note_verdict, by, bench.metrics
        )
        results = []
        for episode, vote in zip(episodes, votes, strict=True):
            bench.judge.votes = [vote]
            judged = await activities.judge_episode(JudgeEpisode(episode=episode.id))
            results.append((judged.turns, judged.judged))
        return results


async def settle(bench: Bench, group: NewGroup, episodes: Sequence[EpisodeBegun], rewards: Sequence[float]) -> int:
    store = PostgresEpisodeStore(bench.database)
    for episode, reward in zip(episodes, rewards, strict=True):
        await store.score_episode(EpisodeScore(episode.id, reward, ""))
    result, _ = await store.settle(group.id)
    assert result.state is GroupState.SETTLED
    return result.samples


async def test_votes_tell_episodes_of_the_same_outcome_apart(bench: Bench) -> None:
    await set_recipe(bench, with_signal(reward="outcome_process", process_weight=0.5))
    group, episodes = await begin(bench, 2)
    assert (await PostgresEpisodeStore(bench.database).begin_group(group.id, timedelta(hours=1))).judged
    # The last turn is followed by nothing: the outcome closes it.
    assert await judge(bench, episodes, [1, -1]) == [(3, 2), (3, 2)]
    # A retry asks for nothing again.
    assert await judge(bench, episodes, [-1, 1]) == [(3, 2), (3, 2)]
    assert bench.rows("SELECT count(*) AS votes FROM votes") == [{"votes": 12}]
    assert await settle(bench, group, episodes, [1.0, 1.0]) == 6
    query = """SELECT t.episode_id, s.reward, t.outcome_detail AS why FROM samples s JOIN turns t ON t.id = s.turn_id
        ORDER BY t.id"""
    rows = bench.rows(query)
    assert [row["reward"] for row in rows] == pytest.approx([1, 1, 1, -1, -1, -1])
    assert rows[0]["why"] == "reward 1, mean vote +1.00, advantage +1.00 among 2 episodes"
    assert rows[2]["why"] == "reward 1, advantage +1.00 among 2 episodes"
    decided = "SELECT count(*) FILTER (WHERE decided_at IS NULL) AS open, count(*) AS all FROM judgements"
    assert bench.rows(decided) == [{"open": 0, "all": 6}]
    assert await violations(bench.database) == []


async def test_the_precision_of_stored_votes_is_counted_by_how_many_they_are(bench: Bench) -> None:
    await set_recipe(bench, with_signal(reward="outcome_process"))
    reader = PostgresVoteReader(bench.database)
    assert await reader.voted_turns("default") == []
    group, episodes = await begin(bench, 3)
    await judge(bench, episodes, [1, -1, -1])
    assert await reader.voted_turns("default") == []  # none has a reward yet
    await settle(bench, group, episodes, [1.0, 0.0, 1.0])
    expected = {"turns": 6, "base": pytest.approx(2 / 3), "good": 2, "good_precision": 1.0}
    expected |= {"bad": 4, "bad_precision": 0.5}
    found = await judge_precision(reader.voted_turns, "default")
    assert [asdict(row) for row in found.by_votes] == [{"m": m, **expected} for m in (1, 3)]
    with pytest.raises(NotFound, match="no policy"):
        await reader.voted_turns("other")


async def test_each_step_has_its_own_votes(bench: Bench) -> None:
    signal = {"reward": "outcome_process", "process_weight": 1.0, "episode_advantage": "step"}
    await set_recipe(bench, with_signal(**signal))
    group, episodes = await begin(bench, 2)
    await judge(bench, episodes, [1, -1])
    # At the last step both have the outcome alone, and it is the same: nothing to learn there.
    assert await settle(bench, group, episodes, [0.0, 0.0]) == 4
    states = bench.rows("SELECT outcome, count(*) AS turns FROM turns GROUP BY outcome ORDER BY outcome")
    assert states == [{"outcome": "sampled", "turns": 4}, {"outcome": "undecided", "turns": 2}]


async def test_votes_that_teach_nothing_are_decided_too(bench: Bench) -> None:
    await set_recipe(bench, with_signal(reward="outcome_process"))
    group, episodes = await begin(bench, 2)
    await judge(bench, episodes, [0, 0])
    assert await settle(bench, group, episodes, [1.0, 1.0]) == 0
    rows = bench.rows("SELECT DISTINCT outcome, expected FROM judgements")
    assert rows == [{"outcome": "undecided", "expected": 0.0}]


async def test_without_weight_no_judge_is_asked(bench: Bench) -> None:
    for recipe in (with_signal(), with_signal(reward="outcome_process", process_weight=0.0)):
        await set_recipe(bench, recipe)
        group, _ = await begin(bench, 2)
        assert not (await PostgresEpisodeStore(bench.database).begin_group(group.id, timedelta(hours=1))).judged
