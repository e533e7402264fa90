"""A policy's curriculum in PostgreSQL: success moves levels and weights of the tasks that are drawn next."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from clawloop.core.contracts.episodes import Ending, EpisodeEnd, EpisodeScore, KindView, RolloutsPlan
from clawloop.core.episodes.curriculum import groups_to_move
from clawloop.core.episodes.kinds import split_task_id
from clawloop.core.errors import ValueRejected
from clawloop.core.ids import RolloutGroupId
from db.episodes.groups import PostgresEpisodeStore
from db.episodes.rollouts import PostgresRolloutStore
from tests.contract.episodes import LIFETIME, view_of
from tests.contract.learning import POLICY, PostgresLearning

SIZE = 8
PLAN = RolloutsPlan("tool-call", SIZE, 3, 1000, curriculum=True)


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


async def test_success_moves_what_is_drawn_next(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresRolloutStore(learning.database)
    view = await store.start(POLICY, PLAN)
    assert view.plan == PLAN
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


async def test_groups_that_began_before_a_change_are_not_counted_for_it(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
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


async def test_a_curriculum_goes_on_where_it_was_left_and_can_be_left_out(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, PLAN)
    await _until(learning, {("plus", 2): 1.0}, lambda kinds: kinds["plus"].level == 3)
    without = await store.start(POLICY, RolloutsPlan("tool-call", SIZE, 6, 1000))
    assert (without.curriculum, without.plan and without.plan.curriculum) == ([], False)
    newest = (await store.next_groups(POLICY)).open[-1]
    assert re.fullmatch(r"train-\d+", (await view_of(PostgresEpisodeStore(learning.database), newest)).task)
    again = await store.start(POLICY, PLAN)
    assert {kind.kind: kind.level for kind in again.curriculum} == {"plus": 3, "minus": 2, "times": 2}


async def test_rollouts_go_on_until_a_curriculum_could_move_every_kind(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
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


async def test_groups_without_rewards_stop_rollouts_as_soon_with_a_curriculum(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    store = PostgresRolloutStore(learning.database)
    await store.start(POLICY, RolloutsPlan("tool-call", SIZE, 1, 2, curriculum=True))
    for _ in range(2):
        [group] = (await store.next_groups(POLICY)).open
        await _finish(learning, group, [None] * SIZE)
    assert (await store.next_groups(POLICY)).reason.startswith("paused: 2 groups in a row gave no sample")


async def test_an_environment_without_kinds_of_tasks_is_refused(postgres_learning: PostgresLearning) -> None:
    store = PostgresRolloutStore(postgres_learning.database)
    with pytest.raises(ValueRejected, match=r"terminal, tool-call.*'tasks'"):
        await store.start(POLICY, RolloutsPlan("tasks", SIZE, 2, 20, curriculum=True))
    assert (await store.status(POLICY)).plan is None
