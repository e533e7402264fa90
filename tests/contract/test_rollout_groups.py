"""The ledger of rollout groups: attempts, rewards and settling, in memory and in PostgreSQL."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

import pytest

from activities.episodes import EpisodeStore
from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeBegun,
    EpisodeEnd,
    EpisodeScore,
    EpisodeState,
    GroupState,
)
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import EpisodeId, RolloutGroupId
from db.database import Database
from db.episodes.groups import PostgresEpisodeStore
from tests.contract.episodes import LIFETIME, new_group
from tests.fakes.episode_store import FakeEpisodeStore


class Store(EpisodeStore, Protocol):
    async def key_of(self, episode: EpisodeId) -> str: ...


@pytest.fixture(params=["fake", "postgres"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "fake":
        return FakeEpisodeStore()
    database: Database = request.getfixturevalue("database")
    return PostgresEpisodeStore(database)


async def begin(store: Store, size: int) -> tuple[RolloutGroupId, list[EpisodeBegun]]:
    group = new_group(size)
    await store.make_group(group)
    return group.id, [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(size)]


async def end(store: Store, episode: EpisodeBegun, reward: float | None) -> None:
    await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
    await store.score_episode(EpisodeScore(episode.id, reward, "checked"))


async def test_a_group_of_a_policy_that_does_not_exist_or_too_small_is_refused(store: Store) -> None:
    with pytest.raises(RecordUnusable):
        await store.make_group(new_group(4, policy="other"))
    with pytest.raises(RecordUnusable):
        await store.make_group(new_group(1))


async def test_the_same_attempt_is_the_same_episode(store: Store) -> None:
    group = new_group(2)
    await store.make_group(group)
    await store.make_group(group)
    first = await store.begin_episode(group.id, 0, 1, LIFETIME)
    assert await store.begin_episode(group.id, 0, 1, LIFETIME) == first
    assert (first.group, first.place, first.attempt) == (group.id, 0, 1)


async def test_another_attempt_is_another_episode_and_ends_the_first(store: Store) -> None:
    group, (first, _) = await begin(store, 2)
    first_key = await store.key_of(first.id)
    second = await store.begin_episode(group, 0, 2, LIFETIME)
    assert second.id != first.id
    assert await store.key_of(second.id) != first_key
    with pytest.raises(RecordUnusable, match="does not run"):
        await store.key_of(first.id)
    # What the lost attempt still reports changes nothing.
    await end(store, first, 1.0)
    assert (await store.settle(group))[0].scored == 0


async def test_a_workflow_that_begins_again_finds_each_place_as_it_was_left(store: Store) -> None:
    group, (running, ended, scored, lost) = await begin(store, 4)
    await store.end_episode(EpisodeEnd(ended.id, Ending.COMPLETED, artifact_sha256="ab" * 32))
    await end(store, scored, 1.0)
    await store.end_episode(EpisodeEnd(lost.id, Ending.INFRASTRUCTURE, "its sandbox died"))
    found = [await store.begin_episode(group, place, 1, LIFETIME) for place in range(4)]
    assert found == [
        running,
        replace(ended, state=EpisodeState.ENDED, artifact_sha256="ab" * 32),
        replace(scored, state=EpisodeState.SCORED),
        replace(lost, state=EpisodeState.ABANDONED),
    ]
    # No further attempt takes the place of one that ended.
    assert await store.begin_episode(group, 2, 2, LIFETIME) == found[2]
    assert (await store.begin_episode(group, 3, 2, LIFETIME)).state is EpisodeState.RUNNING


async def test_a_group_begins_all_its_places_at_once_or_finds_them_as_they_were_left(store: Store) -> None:
    group = new_group(4)
    await store.make_group(group)
    ended = await store.begin_episode(group.id, 1, 1, LIFETIME)
    await store.end_episode(EpisodeEnd(ended.id, Ending.COMPLETED, artifact_sha256="ab" * 32))
    begun = await store.begin_group(group.id, LIFETIME)
    assert (begun.task, begun.size, begun.state, begun.judged) == (group.task, 4, GroupState.OPEN, False)
    assert [(episode.place, episode.attempt) for episode in begun.episodes] == [(place, 1) for place in range(4)]
    assert begun.episodes[1] == replace(ended, state=EpisodeState.ENDED, artifact_sha256="ab" * 32)
    assert len({await store.key_of(begun.episodes[place].id) for place in (0, 2, 3)}) == 3
    assert await store.begin_group(group.id, LIFETIME) == begun
    await store.settle(group.id)
    settled = await store.begin_group(group.id, LIFETIME)
    assert (settled.state, list(settled.episodes)) == (GroupState.DROPPED, [])
    with pytest.raises(RecordUnusable, match="no rollout group"):
        await store.begin_group(RolloutGroupId(uuid4()), LIFETIME)


async def test_a_reward_that_came_with_the_end_is_written_with_it_or_neither_is(store: Store) -> None:
    group, (first, second) = await begin(store, 2)
    for _ in range(2):  # a call that is repeated
        await store.end_episode(EpisodeEnd(first.id, Ending.COMPLETED, score=EpisodeScore(first.id, 1.0, "checked")))
    with pytest.raises(RecordUnusable, match="does not run"):
        await store.key_of(first.id)
    await store.end_episode(EpisodeEnd(second.id, Ending.COMPLETED, score=EpisodeScore(second.id, None, "none")))
    result, _ = await store.settle(group)
    assert (result.scored, result.mean_reward) == (1, 1.0)


async def test_groups_and_places_that_do_not_exist_are_refused(store: Store) -> None:
    with pytest.raises(RecordUnusable, match="no rollout group"):
        await store.begin_episode(RolloutGroupId(uuid4()), 0, 1, LIFETIME)
    with pytest.raises(RecordUnusable, match="no rollout group"):
        await store.settle(RolloutGroupId(uuid4()))
    with pytest.raises(RecordUnusable, match="does not run"):
        await store.key_of(EpisodeId(uuid4()))
    group, _ = await begin(store, 2)
    with pytest.raises(RecordUnusable):
        await store.begin_episode(group, 2, 1, LIFETIME)


async def test_an_episodes_key_ends_with_it(store: Store) -> None:
    _, (episode, _) = await begin(store, 2)
    assert await store.key_of(episode.id) == await store.key_of(episode.id)
    await store.end_episode(EpisodeEnd(episode.id, Ending.TRUNCATED_TIME))
    with pytest.raises(RecordUnusable, match="does not run"):
        await store.key_of(episode.id)


@pytest.mark.parametrize("ending", [Ending.COMPLETED, Ending.INFRASTRUCTURE])
async def test_what_an_agent_left_is_noted_once_whatever_the_ending(store: Store, ending: Ending) -> None:
    group, (episode, _) = await begin(store, 2)
    for left in ("ab", "cd"):
        await store.end_episode(EpisodeEnd(episode.id, ending, artifact_sha256=left))
    found = await store.begin_episode(group, 0, 1, LIFETIME)
    assert found.artifact_sha256 == "ab"


async def test_a_reward_is_written_once(store: Store) -> None:
    group, (first, second) = await begin(store, 2)
    await end(store, first, 1.0)
    await end(store, second, 0.0)
    await store.score_episode(EpisodeScore(second.id, 1.0, "a second reward"))
    assert (await store.settle(group))[0].mean_reward == 0.5


async def test_a_reward_outside_0_to_1_is_refused(store: Store) -> None:
    """Such as a worker sends that does not know its verifier's range: O = 2 · reward − 1 would be no −1 to 1."""
    _, (episode, _) = await begin(store, 2)
    await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
    for reward in (1.5, -0.5, math.inf, math.nan):
        with pytest.raises(RecordUnusable, match="not between 0 and 1"):
            await store.score_episode(EpisodeScore(episode.id, reward))
    await store.score_episode(EpisodeScore(episode.id, 0.25))


async def test_a_running_episode_gets_no_reward(store: Store) -> None:
    group, episodes = await begin(store, 2)
    for episode in episodes:
        await store.score_episode(EpisodeScore(episode.id, 1.0, "too early"))
    result, _ = await store.settle(group)
    assert (result.state, result.scored, result.mean_reward) == (GroupState.DROPPED, 0, None)
    expected = "0 of 2 episodes have a reward, 2 are needed; for example: its group was settled without it"
    assert result.reason == expected


async def test_half_of_the_rewards_settle_a_group_and_an_unscored_episode_counts_for_nothing(
    store: Store,
) -> None:
    group, (one, two, three, four) = await begin(store, 4)
    await end(store, one, 1.0)
    await end(store, two, 0.5)
    await end(store, three, None)
    await store.end_episode(EpisodeEnd(four.id, Ending.INFRASTRUCTURE, "its sandbox died"))
    result, _ = await store.settle(group)
    assert (result.state, result.scored, result.mean_reward) == (GroupState.SETTLED, 2, 0.75)


async def test_fewer_rewards_drop_a_group(store: Store) -> None:
    group, (one, two, three, four, five) = await begin(store, 5)
    await end(store, one, 1.0)
    await end(store, two, 0.0)
    for episode in (three, four, five):
        await end(store, episode, None)
    result, _ = await store.settle(group)
    assert (result.state, result.scored) == (GroupState.DROPPED, 2)
    assert result.reason == "2 of 5 episodes have a reward, 3 are needed; for example: checked"


async def test_a_group_is_settled_once(store: Store) -> None:
    group, (first, second, _) = await begin(store, 3)
    await end(store, first, 1.0)
    await end(store, second, 0.0)
    settled, _ = await store.settle(group)
    assert await store.settle(group) == (settled, None)
    with pytest.raises(RecordUnusable, match="settled"):
        await store.begin_episode(group, 2, 2, LIFETIME)
