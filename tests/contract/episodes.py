"""Rollout groups over one policy, with turns and samples in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeBegun,
    EpisodeEnd,
    EpisodeScore,
    GroupResult,
    GroupView,
    NewGroup,
)
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.ids import ApiKeyId, RolloutGroupId, new_rollout_group_id
from db.episodes.groups import PostgresEpisodeStore
from tests.contract.learning import POLICY, PostgresLearning
from tests.records import turn_record

LIFETIME = timedelta(hours=1)


def new_group(size: int, policy: str = POLICY) -> NewGroup:
    return NewGroup(new_rollout_group_id(), policy, "tool-call", "task-1", size)


async def add_turns(
    learning: PostgresLearning, episode: EpisodeBegun, count: int, *, version: int = 0
) -> list[TurnRecord]:
    """Turns of an episode that do not continue each other."""
    turns = [
        turn_record(
            f"{episode.id} {number}",
            api_key_id=ApiKeyId(episode.id),
            episode_id=episode.id,
            version=version,
        )
        for number in range(count)
    ]
    for turn in turns:
        await learning.turns.insert(turn)
    return turns


async def run_group(
    learning: PostgresLearning, rewards: Sequence[float | None], *, turns: int = 1, version: int = 0
) -> tuple[GroupResult, list[EpisodeBegun]]:
    """A settled group, with one episode for each reward."""
    store = PostgresEpisodeStore(learning.database)
    group = new_group(len(rewards))
    await store.make_group(group)
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(len(rewards))]
    for episode, reward in zip(episodes, rewards, strict=True):
        await add_turns(learning, episode, turns, version=version)
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await store.score_episode(EpisodeScore(episode.id, reward, "" if reward is not None else "the verifier hung"))
    result, _ = await store.settle(group.id)
    return result, episodes


async def samples_of_group(learning: PostgresLearning, group: RolloutGroupId) -> list[dict[str, object]]:
    query = """SELECT s.id, s.state, s.reward, s.reason, t.episode_id FROM samples s JOIN turns t ON t.id = s.turn_id
        WHERE s.rollout_group_id = %s ORDER BY t.id"""
    return await learning.rows(query, group)


async def view_of(store: PostgresEpisodeStore, group: RolloutGroupId) -> GroupView:
    """The group as people see it; one of the newest hundred."""
    [view] = [view for view in await store.groups(policy=None, after=None, limit=100) if view.id == group]
    return view
