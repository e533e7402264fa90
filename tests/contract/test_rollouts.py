"""Rollout groups, their curriculum and what settling makes of their turns."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.episodes import EpisodeStore
from benchmarks.episode_ledger import Scored, count_by_environment, places_since, scored_since, turns_lost
from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeBegun,
    EpisodeEnd,
    EpisodeScore,
    EpisodeState,
    GroupState,
    KindView,
    RolloutsPlan,
    RolloutsState,
)
from clawloop.core.contracts.training import BatchSample, SampleState, StepState
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome, TurnStatus
from clawloop.core.episodes.curriculum import groups_to_move
from clawloop.core.episodes.keys import KEY_LIFETIME, EpisodeKey, sign, verify
from clawloop.core.episodes.kinds import split_task_id
from clawloop.core.errors import NotFound, RecordUnusable, StateConflict, ValueRejected
from clawloop.core.ids import ApiKeyId, EpisodeId, RolloutGroupId, SampleId
from clawloop.core.recipes.recipe import Gate
from clawloop.core.samples.decision import is_held_out
from db.database import Database
from db.episodes.groups import PostgresEpisodeStore
from db.episodes.rollouts import PostgresRolloutStore
from db.invariants import violations
from db.judging.rejudging import PostgresRejudgeStore
from db.serving.keys import PostgresKeyStore
from db.sweep import PostgresSweepStore
from db.training.gate_checks import read_held_out
from db.turns.read import ConversationCache
from tests.contract.episodes import LIFETIME, add_turns, new_group, run_group, samples_of_group, view_of
from tests.contract.learning import POLICY, PostgresLearning, commit, publish, recipe, step, trained
from tests.fakes.episode_store import FakeEpisodeStore
from tests.records import turn_record


@pytest.fixture
def learning(postgres_learning: PostgresLearning) -> PostgresLearning:
    """In PostgreSQL alone."""
    return postgres_learning


# A policy's rollouts in PostgreSQL: which groups start, and when none does.

PLAN = RolloutsPlan("tool-call", 4, 2, 3)


async def test_groups_are_kept_in_flight_with_a_new_task_each(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    groups = PostgresEpisodeStore(learning.database)
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


async def test_the_oldest_open_groups_of_an_environment_are_found(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    groups = PostgresEpisodeStore(learning.database)
    await store.start(POLICY, PLAN)
    started = (await store.next_groups(POLICY)).open
    await groups.make_group(new_group(2))
    found = await store.oldest_open("tool-call", 10)
    assert found[:2] == started
    assert await store.oldest_open("tool-call", 1) == started[:1]
    assert await store.oldest_open("terminal", 10) == []
    await groups.settle(started[0])
    assert (await store.oldest_open("tool-call", 10))[0] == started[1]


async def test_another_environment_is_not_held_up_by_groups_of_the_former_one(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    groups = PostgresEpisodeStore(learning.database)
    await store.start(POLICY, replace(PLAN, environment="termnal"))
    waiting, ran = (await store.next_groups(POLICY)).open
    await groups.begin_group(waiting, LIFETIME)
    begun = (await groups.begin_group(ran, LIFETIME)).episodes
    await add_turns(learning, begun[0], 1)
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


async def test_a_group_starts_once_its_first_episode_has_room(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    groups = PostgresEpisodeStore(learning.database)
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


async def test_an_agent_that_is_lost_or_ends_in_a_pause_makes_no_room(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    groups = PostgresEpisodeStore(learning.database)
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


async def test_a_pause_starts_nothing_and_lets_groups_end(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
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
        await PostgresEpisodeStore(learning.database).settle(group)
    assert await store.running() == []
    await store.start(POLICY, PLAN)
    assert (await store.next_groups(POLICY)).running


async def test_a_retired_policys_rollouts_end_and_cannot_be_started(learning: PostgresLearning) -> None:
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


async def test_rollouts_wait_while_training_is_paused_or_behind(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    await learning.set_recipe(recipe(batch_groups=1))
    await store.start(POLICY, PLAN)
    for _ in range(2):
        await run_group(learning, [1, 0])
    found = await store.next_groups(POLICY)
    assert (found.running, found.open, found.reason) == (True, [], "2 groups wait to be trained")
    await learning.operators.pause(POLICY, "a look")
    assert (await store.next_groups(POLICY)).reason == "training is paused: a look"


async def test_rollouts_stop_themselves_after_barren_groups(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, PLAN)
    await run_group(learning, [1, 0])
    assert (await store.status(POLICY)).reason == ""
    for _ in range(2):
        await run_group(learning, [None, None])
    assert (await store.next_groups(POLICY)).running
    no_reward = "the last group: 0 of 2 episodes have a reward, 2 are needed; for example: the verifier hung"
    assert (await store.status(POLICY)).reason == no_reward
    # Also if they are continued: what was wrong may not be mended.
    assert (await store.start(POLICY, PLAN)).reason == no_reward
    await learning.execute("UPDATE rollouts SET environment = 'another'")
    assert (await store.status(POLICY)).reason == ""
    await learning.execute("UPDATE rollouts SET environment = 'tool-call', started_at = '2000-01-01'")
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


async def test_a_policy_that_does_not_exist_is_named(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    with pytest.raises(NotFound, match="no policy 'other'"):
        await store.start("other", PLAN)
    with pytest.raises(NotFound, match="no policy 'other'"):
        await store.status("other")


# The ledger of rollout groups: attempts, rewards and settling, in memory and in PostgreSQL.


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


async def test_half_of_the_rewards_settle_a_group_and_an_unscored_episode_counts_for_nothing(store: Store) -> None:
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


# What settling a rollout group makes of its turns, and how steps claim whole groups.


async def outcomes(learning: PostgresLearning, episode: object) -> list[tuple[str, str]]:
    query = "SELECT outcome, outcome_detail AS why FROM turns WHERE episode_id = %s ORDER BY id"
    return [(row["outcome"], row["why"]) for row in await learning.rows(query, episode)]


async def test_every_turn_of_an_episode_gets_its_advantage(learning: PostgresLearning) -> None:
    result, episodes = await run_group(learning, [1, 0, 0, None], turns=2)
    assert (result.state, result.scored, result.samples) == (GroupState.SETTLED, 3, 6)
    samples = await samples_of_group(learning, result.id)
    by_episode = {e.id: [s["reward"] for s in samples if s["episode_id"] == e.id] for e in episodes}
    assert by_episode[episodes[0].id] == pytest.approx([2**0.5] * 2)
    assert by_episode[episodes[1].id] == by_episode[episodes[2].id] == pytest.approx([-(0.5**0.5)] * 2)
    assert by_episode[episodes[3].id] == []
    assert (await outcomes(learning, episodes[0].id))[0] == (
        "sampled",
        "reward 1, advantage +1.41 among 3 episodes",
    )
    assert (
        await outcomes(learning, episodes[3].id) == [("unjudged", "its episode has no reward: the verifier hung")] * 2
    )
    view = await PostgresEpisodeStore(learning.database).episode(episodes[0].id)
    assert view is not None
    assert view.advantage == pytest.approx(2**0.5)
    assert (view.turns, view.tokens) == (2, 4)
    assert await violations(learning.database) == []


async def test_a_held_out_group_is_never_trained_and_versions_are_compared_on_it(learning: PostgresLearning) -> None:
    await learning.set_recipe(recipe().model_copy(update={"gate": Gate(held_out=0.5)}))
    sides: dict[bool, RolloutGroupId] = {}
    while len(sides) < 2:  # each group is held out or not with even odds
        result, _ = await run_group(learning, [1, 0])
        assert (result.state, result.samples) == (GroupState.SETTLED, 2)
        sides[is_held_out(POLICY, result.id, 0.5)] = result.id
    for held_out, group in sides.items():
        found = await samples_of_group(learning, group)
        state = SampleState.HELD_OUT if held_out else SampleState.FRESH
        assert {sample["state"] for sample in found} == {state}
        query = """SELECT DISTINCT t.outcome, t.outcome_detail LIKE 'held out: reward %%' AS said FROM turns t
            JOIN samples s ON s.turn_id = t.id WHERE s.rollout_group_id = %s"""
        assert await learning.rows(query, group) == [
            {"outcome": "held_out" if held_out else "sampled", "said": held_out}
        ]

    async def read(connection: AsyncConnection) -> list[BatchSample]:
        later = datetime.now(UTC) + timedelta(minutes=1)
        return await read_held_out(connection, ConversationCache(), POLICY, later, Gate(held_out=0.5))

    compared = await learning.database.run(read)
    held = {row["id"] for row in await learning.rows("SELECT id FROM samples WHERE state = 'held_out'")}
    assert {sample.sample_id for sample in compared} == held
    assert {sample.reward for sample in compared} == {1.0, -1.0}
    assert await violations(learning.database) == []


async def test_equal_rewards_tell_the_difficulty_and_teach_nothing(learning: PostgresLearning) -> None:
    result, episodes = await run_group(learning, [1, 1, 1])
    assert (result.state, result.mean_reward, result.samples) == (GroupState.SETTLED, 1.0, 0)
    assert (await outcomes(learning, episodes[0].id))[0][0] == TurnOutcome.UNDECIDED


async def test_a_turn_that_cannot_be_trained_says_why(learning: PostgresLearning) -> None:
    store = PostgresEpisodeStore(learning.database)
    group = new_group(3)
    await store.make_group(group)
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(3)]
    for place, episode in enumerate(episodes):
        (turn,) = await add_turns(learning, episode, 1)
        if place == 1:
            garbage = f'{{"role": "assistant", "content": "{"!" * 64}"}}'
            await learning.execute("UPDATE turns SET response = %s WHERE id = %s", garbage, turn.turn_id)
        if place == 0:
            sampling = '{"temperature": 1.0, "top_p": 0.9, "top_k": -1}'
            await learning.execute("UPDATE turns SET sampling = %s WHERE id = %s", sampling, turn.turn_id)
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await store.score_episode(EpisodeScore(episode.id, place / 2, ""))
    assert (await store.settle(group.id))[0].samples == 1
    assert await outcomes(learning, episodes[0].id) == [("not_trainable", "not trainable: top_p")]
    assert await outcomes(learning, episodes[1].id) == [("not_trainable", "not trainable: reply of one character")]


async def test_turns_of_lost_attempts_and_after_the_end_are_not_trained(learning: PostgresLearning) -> None:
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    lost = await store.begin_episode(group.id, 0, 1, LIFETIME)
    await add_turns(learning, lost, 1)
    await store.end_episode(EpisodeEnd(lost.id, Ending.INFRASTRUCTURE, "its worker died"))
    ran = []
    for place, attempt in ((0, 2), (1, 1)):
        episode = await store.begin_episode(group.id, place, attempt, LIFETIME)
        await add_turns(learning, episode, 1)
        await store.end_episode(EpisodeEnd(episode.id, Ending.AGENT_ERROR))
        await store.score_episode(EpisodeScore(episode.id, float(place), ""))
        await add_turns(learning, episode, 1)
        ran.append(episode.id)
    assert (await store.settle(group.id))[0].samples == 2
    assert await outcomes(learning, lost.id) == [("unjudged", "its episode was abandoned: its worker died")]
    assert (await outcomes(learning, ran[0]))[1] == ("side", "its episode had ended")
    # Turns that waited in a gateway's spool: of the first attempt while it ran, and of one whose key was still cached.
    (late, _) = await add_turns(learning, lost, 2)
    began = "UPDATE turns SET started_at = now() - interval '1 hour' WHERE id = %s"
    await learning.execute(began, late.turn_id)
    assert await store.end_late_turns() == 2
    assert await store.end_late_turns() == 0
    assert (await outcomes(learning, lost.id))[1:] == [
        ("unjudged", "stored after its rollout group was settled"),
        ("side", "its episode had ended"),
    ]
    assert await violations(learning.database) == []


ENDINGS = [ending for ending in Ending if ending is not Ending.INFRASTRUCTURE]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_episode_is_trained_however_it_ended(learning: PostgresLearning, ending: Ending) -> None:
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    for place in range(2):
        episode = await store.begin_episode(group.id, place, 1, LIFETIME)
        await add_turns(learning, episode, 1)
        await store.end_episode(EpisodeEnd(episode.id, ending))
        await store.score_episode(EpisodeScore(episode.id, float(place), ""))
    assert (await store.settle(group.id))[0].samples == 2
    assert [sample["reward"] for sample in await samples_of_group(learning, group.id)] == [-1.0, 1.0]


async def test_late_turns_end_without_a_deadlock_with_a_turn_that_is_stored(learning: PostgresLearning) -> None:
    """A gateway's transaction locks the session first, then a turn of it."""
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    episode = await store.begin_episode(group.id, 0, 1, LIFETIME)
    await store.settle(group.id)
    (turn,) = await add_turns(learning, episode, 1)
    locks = "SELECT count(*) AS waiting FROM pg_locks WHERE NOT granted"
    async with await psycopg.AsyncConnection.connect(learning.url) as gateway:
        query = "SELECT id FROM sessions WHERE id = (SELECT session_id FROM turns WHERE id = %s) FOR UPDATE"
        await gateway.execute(query, [turn.turn_id])
        ending = asyncio.create_task(store.end_late_turns())
        while (await learning.rows(locks))[0]["waiting"] == 0:
            await asyncio.sleep(0.02)
        await gateway.execute("UPDATE turns SET outcome_detail = 'stored' WHERE id = %s", [turn.turn_id])
    assert await ending == 1
    assert (await learning.rows("SELECT state FROM sessions"))[0]["state"] == "closed"


async def test_no_session_workflow_and_no_judge_gets_a_turn_of_an_episode(learning: PostgresLearning) -> None:
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    episode = await store.begin_episode(group.id, 0, 1, LIFETIME)
    (turn,) = await add_turns(learning, episode, 1)
    sweep = PostgresSweepStore(learning.database)
    assert await sweep.pending_turns(timedelta(0), 10) == []
    assert await sweep.sessions_left_open(timedelta(0), 10) == []
    assert await PostgresRejudgeStore(learning.database).rejudge_facts(turn.turn_id) is None
    await store.settle(group.id)
    assert (await learning.rows("SELECT state FROM sessions"))[0]["state"] == "closed"


async def test_a_step_takes_whole_groups_and_no_chats(learning: PostgresLearning) -> None:
    await learning.set_recipe(recipe(batch_groups=2, batch_samples=2))
    first, _ = await run_group(learning, [1, 0], turns=2)
    assert not await learning.work_waiting()
    assert (await learning.steps.claim(POLICY, 1)).reason == "1 of 2 rollout groups"
    assert (await learning.steps.status(POLICY)).reason == "0 of 2 samples for the next step; 1 of 2 rollout groups"
    second, _ = await run_group(learning, [1, 0, 0])
    third, _ = await run_group(learning, [1, 0])
    assert await learning.work_waiting()
    chats = await learning.add_samples(2)
    assert (await learning.steps.claim(POLICY, 1)).samples == 7
    batch = await learning.steps.batch(POLICY, 1)
    claimed = {sample.sample_id for sample in batch.samples}
    assert claimed == {s["id"] for g in (first, second) for s in await samples_of_group(learning, g.id)}
    assert len({sample.episode for sample in batch.samples}) == 5
    assert await violations(learning.database) == []
    assert await commit(learning, batch, trained(batch)) is StepState.COMMITTED
    assert await violations(learning.database) == []
    # The chat's samples have waited less than the groups did, and are the next batch.
    assert (await learning.steps.claim(POLICY, 2)).samples == 2
    assert [(await learning.sample_result(chat))[0] for chat in chats] == [SampleState.CLAIMED] * 2
    assert {s["state"] for s in await samples_of_group(learning, third.id)} == {"fresh"}


async def test_a_group_expires_as_a_whole_by_its_oldest_turn(learning: PostgresLearning) -> None:
    engine = await learning.add_engine("http://e0")
    await learning.set_recipe(recipe(batch_groups=1, group_staleness_versions=1))
    for n in (1, 2):
        await step(learning, n)
        await publish(learning, n, engine)
    stale, episodes = await run_group(learning, [1, 0], version=2)
    await learning.execute("UPDATE turns SET version = 0 WHERE episode_id = %s", episodes[1].id)
    assert (await learning.steps.claim(POLICY, 3)).state is None
    states = [(s["state"], s["reason"]) for s in await samples_of_group(learning, stale.id)]
    assert states == [("expired", "stale: its group's oldest turn is 2 versions apart, bound 1")] * 2
    fresh, _ = await run_group(learning, [1, 0], version=2)
    assert (await learning.steps.claim(POLICY, 3)).samples == 2
    (sample, _) = await samples_of_group(learning, fresh.id)
    assert (await learning.sample_result(SampleId(sample["id"])))[0] is SampleState.CLAIMED  # type: ignore[arg-type]


async def test_damage_is_found(learning: PostgresLearning) -> None:
    result, episodes = await run_group(learning, [1, 0])
    await learning.execute(
        "UPDATE turns SET outcome = 'waiting', entered_at = now() - interval '1 hour' WHERE episode_id = %s",
        episodes[0].id,
    )
    await learning.execute("UPDATE api_keys SET revoked_at = NULL WHERE episode_id = %s", episodes[0].id)
    sample = (await samples_of_group(learning, result.id))[0]["id"]
    await learning.execute("UPDATE samples SET state = 'trained' WHERE id = %s", sample)
    found = {violation.invariant for violation in await violations(learning.database)}
    assert {
        "no turn waits for a rollout group that is settled",
        "the key of an episode that has ended is revoked",
        "a step takes all samples of a rollout group or none",
    } <= found


async def test_an_episodes_key_is_found_until_it_ends_or_expires(learning: PostgresLearning) -> None:
    store, keys = PostgresEpisodeStore(learning.database), PostgresKeyStore(learning.database)
    group = new_group(3)
    await store.make_group(group)
    first, second, third = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(3)]
    secret = await store.key_of(first.id)
    key = await keys.authenticate(secret)
    signed = verify(secret, await keys.signing_secret())
    assert key is not None
    assert signed is not None
    assert key.episode == signed.episode == first.id
    assert (key.policy, key.expires_at) == (signed.policy, signed.expires_at)
    await store.end_episode(EpisodeEnd(first.id, Ending.COMPLETED))
    assert await keys.authenticate(secret) is None
    expired = await store.key_of(second.id)
    await learning.execute("UPDATE api_keys SET expires_at = now() WHERE episode_id = %s", second.id)
    assert await keys.authenticate(expired) is None
    # It waited for a place until its key had ended: its agent, which starts now, has all of a key's time.
    renewed = await store.key_of(second.id)
    assert await store.key_of(second.id) == renewed
    again = await keys.authenticate(renewed)
    assert again is not None
    assert again.expires_at is not None
    assert again.expires_at > datetime.now(UTC) + KEY_LIFETIME - timedelta(minutes=5)
    forged = sign(EpisodeKey(third.id, "default", signed.expires_at), b"another secret")
    assert await keys.authenticate(forged) is None
    assert [entry.name for entry in await keys.list_keys()] == ["test"]


async def test_no_second_agent_gets_the_key_of_an_episode_that_has_turns(learning: PostgresLearning) -> None:
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    episode = await store.begin_episode(group.id, 0, 1, LIFETIME)
    await store.key_of(episode.id)
    await add_turns(learning, episode, 1)
    with pytest.raises(RecordUnusable, match="has turns already"):
        await store.key_of(episode.id)


async def test_turns_of_an_episode_after_an_image_give_no_sample(learning: PostgresLearning) -> None:
    store = PostgresEpisodeStore(learning.database)
    group = new_group(2)
    await store.make_group(group)
    image: Message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    for place, episode in enumerate(episodes):
        await add_turns(learning, episode, 1)
        if place == 0:
            for content in ([image], [image, {"role": "user", "content": "more"}]):
                turn = turn_record(api_key_id=ApiKeyId(episode.id), episode_id=episode.id, messages=content)
                await learning.turns.insert(turn)
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await store.score_episode(EpisodeScore(episode.id, 1 - place, ""))
    await store.settle(group.id)
    found = await outcomes(learning, episodes[0].id)
    assert [outcome for outcome, _ in found] == ["sampled", "not_trainable", "not_trainable"]
    assert all(why.startswith("not trainable: image in the prompt") for _, why in found[1:])


async def test_a_new_secret_signs_the_next_keys_and_those_handed_out_stay_valid(learning: PostgresLearning) -> None:
    store, keys = PostgresEpisodeStore(learning.database), PostgresKeyStore(learning.database)
    group = new_group(3)
    await store.make_group(group)
    first, begun = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(2)]
    handed_out, before = await store.key_of(first.id), await keys.signing_secret()
    await keys.drop_signing_secret()
    after = await keys.signing_secret()
    assert after != before
    assert await keys.authenticate(handed_out) is not None
    # One that began before and is handed out now.
    late = await store.key_of(begun.id)
    assert await keys.authenticate(late) is not None
    assert await store.key_of(begun.id) == late
    assert (verify(late, before), verify(late, after) is not None) == (None, True)


# A policy's curriculum in PostgreSQL: success moves levels and weights of the tasks that are drawn next.

SIZE = 8
CURRICULUM_PLAN = RolloutsPlan("tool-call", SIZE, 3, 1000, curriculum=True)


async def _finish(learning: PostgresLearning, group: RolloutGroupId, rewards: Sequence[float | None]) -> None:
    store = PostgresEpisodeStore(learning.database)
    for place, reward in enumerate(rewards):
        episode = await store.begin_episode(group, place, 1, LIFETIME)
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await store.score_episode(EpisodeScore(episode.id, reward, ""))
    await store.settle(group)


async def _practise(learning: PostgresLearning, success: Mapping[tuple[str, int], float], groups: int) -> list[str]:
    """So many groups, finished with the share of success of their kind and level; their tasks."""
    store, episodes = PostgresRolloutStore(learning.database), PostgresEpisodeStore(learning.database)
    tasks: list[str] = []
    while len(tasks) < groups:
        for group in (await store.next_groups(POLICY)).open:
            task = (await view_of(episodes, group)).task
            _, chosen = split_task_id("tool-call", task)
            assert chosen is not None
            good = round(SIZE * success.get((chosen.kind, chosen.level), 0.5))
            await _finish(learning, group, [1.0] * good + [0.0] * (SIZE - good))
            tasks.append(task)
    return tasks


async def _kinds(learning: PostgresLearning) -> dict[str, KindView]:
    view = await PostgresRolloutStore(learning.database).status(POLICY)
    return {kind.kind: kind for kind in view.curriculum}


async def _until(
    learning: PostgresLearning, success: Mapping[tuple[str, int], float], reached: Callable[[dict[str, KindView]], bool]
) -> dict[str, KindView]:
    for _ in range(20):
        if reached(kinds := await _kinds(learning)):
            return kinds
        await _practise(learning, success, 3)
        await PostgresRolloutStore(learning.database).next_groups(POLICY)
    raise AssertionError(await _kinds(learning))


async def test_success_moves_what_is_drawn_next(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    view = await store.start(POLICY, CURRICULUM_PLAN)
    assert view.plan == CURRICULUM_PLAN
    assert [(kind.kind, kind.level, kind.weight, kind.scored) for kind in view.curriculum] == [
        ("minus", 2, 1.0, 0),
        ("plus", 2, 1.0, 0),
        ("times", 2, 1.0, 0),
    ]
    # Sums are too easy, but less so with more digits; products fail, and with fewer digits as well.
    success = {("plus", 2): 1.0, ("times", 2): 0.0, ("times", 1): 0.0}
    kinds = await _until(learning, success, lambda kinds: kinds["plus"].level == 3 and kinds["times"].level == 1)
    assert (kinds["plus"].trial_of, kinds["times"].trial_of) == (2, 2)
    assert kinds["plus"].why == "success 1.00: level 3 instead of 2, on trial"
    assert (kinds["minus"].level, kinds["minus"].success, kinds["minus"].why) == (2, 0.5, "")
    assert any(task.endswith("plus-3") for task in await _practise(learning, success, 6))
    kinds = await _until(learning, success, lambda kinds: not any(kind.trial_of for kind in kinds.values()))
    assert (kinds["plus"].level, kinds["plus"].weight) == (3, 1.0)
    assert kinds["plus"].why == "success 0.50 at level 3, 1.00 at 2: kept"
    assert (kinds["times"].level, kinds["times"].weight, kinds["times"].needed) == (2, 0.5, 64)
    assert kinds["times"].why == "success 0.00 at level 1, 0.00 at 2: undone, not as meant"
    assert len(await learning.rows("SELECT detail FROM events WHERE kind = 'curriculum_moved'")) == 4


async def test_groups_that_began_before_a_change_are_not_counted_for_it(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, RolloutsPlan("tool-call", SIZE, 30, 1000, curriculum=True))
    found = await store.next_groups(POLICY)
    tasks = {group: (await view_of(PostgresEpisodeStore(learning.database), group)).task for group in found.open}
    sums = [group for group, task in tasks.items() if task.endswith("plus-2")]
    for group in sums[:4]:
        await _finish(learning, group, [1.0] * SIZE)
    await store.next_groups(POLICY)
    assert (await _kinds(learning))["plus"].level == 3
    for group in sums[4:]:
        await _finish(learning, group, [0.0] * SIZE)
    await store.next_groups(POLICY)
    assert (await _kinds(learning))["plus"].scored == 0


async def test_a_curriculum_goes_on_where_it_was_left_and_can_be_left_out(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, CURRICULUM_PLAN)
    await _until(learning, {("plus", 2): 1.0}, lambda kinds: kinds["plus"].level == 3)
    without = await store.start(POLICY, RolloutsPlan("tool-call", SIZE, 6, 1000))
    assert (without.curriculum, without.plan and without.plan.curriculum) == ([], False)
    newest = (await store.next_groups(POLICY)).open[-1]
    assert re.fullmatch(r"train-\d+", (await view_of(PostgresEpisodeStore(learning.database), newest)).task)
    again = await store.start(POLICY, CURRICULUM_PLAN)
    assert {kind.kind: kind.level for kind in again.curriculum} == {"plus": 3, "minus": 2, "times": 2}


async def test_rollouts_go_on_until_a_curriculum_could_move_every_kind(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, RolloutsPlan("tool-call", SIZE, 1, 2, curriculum=True))
    needed = groups_to_move(3, SIZE)
    for number in range(needed):
        found = await store.next_groups(POLICY)
        assert found.running, (number, found.reason)
        [group] = found.open
        await _finish(learning, group, [0.0] * SIZE)
    assert {kind.level for kind in (await store.status(POLICY)).curriculum} <= {1, 2}
    found = await store.next_groups(POLICY)
    assert not found.running
    assert found.reason.startswith(f"paused: {needed} groups in a row gave no sample")
    assert len(await learning.rows("SELECT detail FROM events WHERE kind = 'curriculum_moved'")) >= 3


async def test_groups_without_rewards_stop_rollouts_as_soon_with_a_curriculum(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, RolloutsPlan("tool-call", SIZE, 1, 2, curriculum=True))
    for _ in range(2):
        [group] = (await store.next_groups(POLICY)).open
        await _finish(learning, group, [None] * SIZE)
    assert (await store.next_groups(POLICY)).reason.startswith("paused: 2 groups in a row gave no sample")


async def test_an_environment_without_kinds_of_tasks_is_refused(learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(learning.database)
    with pytest.raises(ValueRejected, match=r"terminal, tool-call.*'tasks'"):
        await store.start(POLICY, RolloutsPlan("tasks", SIZE, 2, 20, curriculum=True))
    assert (await store.status(POLICY)).plan is None


# What the benchmark of rollouts finds in the ledger after it killed processes.

LONG_AGO = datetime.now(UTC) - timedelta(days=1)
REPLIES = {"tool-call": 2}
SAYS: Message = {"role": "assistant", "content": "wait"}


@pytest.fixture
def connection(learning: PostgresLearning) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(learning.url, autocommit=True) as opened:
        yield opened


async def played(learning: PostgresLearning, *endings: Ending) -> list[EpisodeBegun]:
    """Scored episodes of one group, whose agents asked twice, and sent the first request again."""
    store = PostgresEpisodeStore(learning.database)
    group = new_group(len(endings))
    await store.make_group(group)
    episodes = [await store.begin_episode(group.id, place, 1, LIFETIME) for place in range(len(endings))]
    for episode, ending in zip(episodes, endings, strict=True):
        for number in (0, 0, 1):
            await ask(learning, episode, number)
        await ask(learning, episode, 2, status=TurnStatus.ABORTED)
        await store.end_episode(EpisodeEnd(episode.id, ending))
        await store.score_episode(EpisodeScore(episode.id, 0.0, ""))
    return episodes


async def ask(learning: PostgresLearning, episode: EpisodeBegun, number: int, **fields: Any) -> None:
    """The next turn of the episode's conversation, after so many others."""
    asked: Message = {"role": "user", "content": f"task of {episode.id}"}
    messages = [asked, *([SAYS, {"role": "user", "content": "Go on."}] * number)]
    fields |= {"evidence": SessionEvidence(SessionSource.HEADER, str(episode.id)), "messages": messages}
    turn = turn_record(api_key_id=ApiKeyId(episode.id), episode_id=episode.id, response=SAYS, **fields)
    await learning.turns.insert(turn)


async def remove_newest(learning: PostgresLearning, episode: EpisodeBegun) -> None:
    """The newest whole turn of an episode, as if it had never been stored."""
    newest = "(SELECT max(id::text)::uuid FROM turns WHERE episode_id = %s AND status = 'complete')"
    later = "SELECT id FROM turns WHERE episode_id = %s AND status = 'aborted'"
    await learning.execute(f"DELETE FROM turns WHERE id IN ({later})", episode.id)
    await learning.execute(f"DELETE FROM turns WHERE id = {newest}", episode.id)


async def test_a_reply_that_was_never_stored_is_a_lost_turn(
    learning: PostgresLearning, connection: psycopg.Connection[Any]
) -> None:
    first, second = await played(learning, Ending.COMPLETED, Ending.COMPLETED)
    scored = scored_since(connection, LONG_AGO)
    assert scored == [Scored("tool-call", True, 2)] * 2
    assert turns_lost(scored, REPLIES) == 0
    assert places_since(connection, LONG_AGO) == {"places": 2, "attempts": 2, "lost": 0, "doubled": 0}
    await remove_newest(learning, first)
    # The request that was sent again, and is stored twice, does not stand for the one that is missing.
    assert turns_lost(scored_since(connection, LONG_AGO), REPLIES) == 1
    await remove_newest(learning, second)
    await remove_newest(learning, second)
    await remove_newest(learning, second)
    assert turns_lost(scored_since(connection, LONG_AGO), REPLIES) == 3
    assert scored_since(connection, datetime.now(UTC) + timedelta(days=1)) == []


async def test_an_agent_that_did_not_complete_may_have_had_fewer_replies(
    learning: PostgresLearning, connection: psycopg.Connection[Any]
) -> None:
    first, _ = await played(learning, Ending.TRUNCATED_TIME, Ending.COMPLETED)
    await remove_newest(learning, first)
    scored = scored_since(connection, LONG_AGO)
    assert sorted(one.replies for one in scored) == [1, 2]
    assert turns_lost(scored, REPLIES) == 0


def test_an_environment_without_an_episode_counts_none() -> None:
    scored = [Scored("tool-call", True, 1)] * 3
    assert count_by_environment(scored, ["tool-call", "vf_sums"]) == {"tool-call": 3, "vf_sums": 0}
