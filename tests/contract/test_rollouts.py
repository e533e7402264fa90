"""A policy's rollouts in PostgreSQL: which groups start, and when none does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeEnd,
    EpisodeScore,
    EpisodeState,
    GroupState,
    RolloutsPlan,
    RolloutsState,
)
from clawloop.core.errors import NotFound, RecordUnusable, StateConflict
from clawloop.core.ids import RolloutGroupId
from db.episodes.groups import PostgresEpisodeStore
from db.episodes.rollouts import PostgresRolloutStore
from tests.contract.episodes import LIFETIME, add_turns, new_group, run_group, view_of
from tests.contract.learning import POLICY, PostgresLearning, recipe

PLAN = RolloutsPlan("tool-call", 4, 2, 3)


async def test_groups_are_kept_in_flight_with_a_new_task_each(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    groups = PostgresEpisodeStore(postgres_learning.database)
    assert (await store.next_groups(POLICY)).running is False
    view = await store.start(POLICY, PLAN)
    assert (view.state, view.plan, view.in_flight) == (RolloutsState.RUNNING, PLAN, 0)
    first = await store.next_groups(POLICY)
    assert (first.running, len(first.open), first.reason) == (True, 2, "2 groups started")
    assert (await store.next_groups(POLICY)).open == first.open
    await groups.settle(first.open[0])
    second = await store.next_groups(POLICY)
    assert second.open[0] == first.open[1]
    assert len(second.open) == 2
    tasks = [await view_of(groups, group) for group in (*first.open, second.open[1])]
    assert [task.task for task in tasks] == ["train-0", "train-1", "train-2"]
    assert {(task.policy, task.environment, task.size) for task in tasks} == {(POLICY, "tool-call", 4)}


async def test_the_oldest_open_groups_of_an_environment_are_found(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    groups = PostgresEpisodeStore(postgres_learning.database)
    await store.start(POLICY, PLAN)
    started = (await store.next_groups(POLICY)).open
    await groups.make_group(new_group(2))
    found = await store.oldest_open("tool-call", 10)
    assert found[:2] == started
    assert await store.oldest_open("tool-call", 1) == started[:1]
    assert await store.oldest_open("terminal", 10) == []
    await groups.settle(started[0])
    assert (await store.oldest_open("tool-call", 10))[0] == started[1]


async def test_another_environment_is_not_held_up_by_groups_of_the_former_one(
    postgres_learning: PostgresLearning,
) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    groups = PostgresEpisodeStore(postgres_learning.database)
    await store.start(POLICY, replace(PLAN, environment="termnal"))
    waiting, ran = (await store.next_groups(POLICY)).open
    await groups.begin_group(waiting, LIFETIME)
    begun = (await groups.begin_group(ran, LIFETIME)).episodes
    await add_turns(postgres_learning, begun[0], 1)
    view = await store.start(POLICY, replace(PLAN, environment="terminal"))
    # What an agent has begun is finished; what nobody has begun is dropped.
    assert (view.in_flight, view.dropped) == (1, 1)
    assert (await view_of(groups, waiting)).state is GroupState.DROPPED
    started = (await store.next_groups(POLICY)).open
    assert len(started) == 3
    tasks = [await view_of(groups, group) for group in started]
    assert [task.environment for task in tasks] == ["termnal", "terminal", "terminal"]
    assert (await store.start(POLICY, replace(PLAN, environment="terminal"))).in_flight == 3


async def agents_end(groups: PostgresEpisodeStore, group: RolloutGroupId, places: Sequence[int]) -> list[str | None]:
    """What each end says, all at the same time."""
    begun = (await groups.begin_group(group, LIFETIME)).episodes
    ends = [groups.end_episode(EpisodeEnd(begun[place].id, Ending.COMPLETED)) for place in places]
    return await asyncio.gather(*ends)


async def test_a_group_starts_once_its_first_episode_has_room(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    groups = PostgresEpisodeStore(postgres_learning.database)
    await store.start(POLICY, PLAN)
    one, two = (await store.next_groups(POLICY)).open
    # Of two groups of four: two end at the same time, and only the end that made the room says so.
    assert sorted(await agents_end(groups, one, [0, 1]), key=str) == [None, POLICY]
    *earlier, three = (await store.next_groups(POLICY)).open
    assert earlier == [one, two]
    # The others of a group's size end before the next one starts, whichever groups they are of.
    assert await agents_end(groups, one, [2]) == [None]
    assert await agents_end(groups, two, [0]) == [None]
    assert (await store.next_groups(POLICY)).open == [one, two, three]
    assert await agents_end(groups, one, [3]) == [POLICY]
    assert len((await store.next_groups(POLICY)).open) == 4
    # Verifiers that never answer leave twice as many groups open, and no more.
    assert await agents_end(groups, two, [1, 2, 3]) == [None] * 3
    assert await agents_end(groups, three, range(4)) == [None] * 4
    assert (await store.next_groups(POLICY)).reason == "0 groups started"
    await groups.settle(one)
    assert (await store.next_groups(POLICY)).reason == "1 groups started"


async def test_an_agent_that_is_lost_or_ends_in_a_pause_makes_no_room(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    groups = PostgresEpisodeStore(postgres_learning.database)
    await store.start(POLICY, RolloutsPlan("tool-call", 2, 1, 3))
    [group] = (await store.next_groups(POLICY)).open
    _, second = (await groups.begin_group(group, LIFETIME)).episodes
    assert await groups.end_episode(EpisodeEnd(second.id, Ending.INFRASTRUCTURE, "its sandbox died")) is None
    assert (await store.next_groups(POLICY)).open == [group]
    again = await groups.begin_episode(group, 1, 2, LIFETIME)
    await store.pause(POLICY, "lunch")
    assert (
        await groups.end_episode(EpisodeEnd(again.id, Ending.COMPLETED, score=EpisodeScore(again.id, 1.0, ""))) is None
    )


async def test_a_pause_starts_nothing_and_lets_groups_end(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    with pytest.raises(NotFound, match="rollouts start"):
        await store.pause(POLICY, "why")
    await store.start(POLICY, PLAN)
    before = await store.next_groups(POLICY)
    assert await store.running() == [POLICY]
    view = await store.pause(POLICY, "lunch")
    assert (view.state, view.reason, view.in_flight) == (RolloutsState.PAUSED, "lunch", 2)
    paused = await store.next_groups(POLICY)
    assert (paused.running, paused.open, paused.reason) == (False, before.open, "paused: lunch")
    assert await store.running() == [POLICY]  # its groups in flight need their workflow
    for group in before.open:
        await PostgresEpisodeStore(postgres_learning.database).settle(group)
    assert await store.running() == []
    await store.start(POLICY, PLAN)
    assert (await store.next_groups(POLICY)).running


async def test_a_retired_policys_rollouts_end_and_cannot_be_started(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresRolloutStore(learning.database)
    groups = PostgresEpisodeStore(learning.database)
    await learning.operators.create_policy("mine", POLICY, None)
    await store.start("mine", PLAN)
    (group, _) = (await store.next_groups("mine")).open
    episode = await groups.begin_episode(group, 0, 1, LIFETIME)
    await learning.operators.retire_policy("mine")
    assert await store.running() == []
    found = await store.next_groups("mine")
    assert (found.running, found.open, found.reason) == (False, [], "paused: the policy is retired")
    view = await groups.episode(episode.id)
    assert view is not None
    assert view.state is EpisodeState.ABANDONED
    with pytest.raises(RecordUnusable, match="does not run"):
        await groups.key_of(episode.id)
    with pytest.raises(StateConflict, match="retired") as raised:
        await store.start("mine", PLAN)
    assert (raised.value.code, raised.value.field) == ("policy_retired", "policy")
    late = new_group(2, "mine")
    await groups.make_group(late)
    with pytest.raises(RecordUnusable, match="'mine' was retired"):
        await groups.begin_episode(late.id, 0, 1, LIFETIME)


async def test_rollouts_wait_while_training_is_paused_or_behind(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresRolloutStore(learning.database)
    await learning.set_recipe(recipe(batch_groups=1))
    await store.start(POLICY, PLAN)
    for _ in range(2):
        await run_group(learning, [1, 0])
    found = await store.next_groups(POLICY)
    assert (found.running, found.open, found.reason) == (True, [], "2 groups wait to be trained")
    await learning.operators.pause(POLICY, "a look")
    assert (await store.next_groups(POLICY)).reason == "training is paused: a look"


async def test_rollouts_stop_themselves_after_barren_groups(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, PLAN)
    await run_group(learning, [1, 0])
    for _ in range(2):
        await run_group(learning, [None, None])
    assert (await store.next_groups(POLICY)).running
    await run_group(learning, [None, 1])
    found = await store.next_groups(POLICY)
    expected = "3 groups in a row gave no sample; the last: 1 of 2 episodes have a reward, 2 are needed"
    expected += "; for example: the verifier hung"
    assert (found.running, found.reason) == (False, f"paused: {expected}")
    view = await store.status(POLICY)
    assert (view.state, view.reason, view.settled, view.dropped) == (RolloutsState.PAUSED, expected, 1, 3)
    # Started again, the groups before count no more.
    await store.start(POLICY, PLAN)
    assert (await store.next_groups(POLICY)).running


async def test_a_policy_that_does_not_exist_is_named(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    with pytest.raises(NotFound, match="no policy 'other'"):
        await store.start("other", PLAN)
    with pytest.raises(NotFound, match="no policy 'other'"):
        await store.status("other")
