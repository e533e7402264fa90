"""The call that completes a batch notifies the training workflow; if the signal fails, the sweep retries."""

from __future__ import annotations

from activities.sweep import SweepActivities
from clawloop.core.recipes.recipe import Recipe
from db.sweep import PostgresSweepStore
from db.training.recipes import set_recipe
from tests.fakes.notifier import FakeNotifier
from tests.judging.conftest import BINARY, Bench
from tests.judging.test_sweep import IDLE

TWO = Recipe.model_validate(
    BINARY.model_dump(mode="json") | {"train": {"batch_samples": 2, "advantage": {"teacher_weight": 0.0}}}
)


async def judge_two(bench: Bench) -> None:
    turns = bench.conversation("a", "b", "c")
    session = await bench.insert(*turns)
    for turn in turns[1:]:
        await bench.judge_turn(session, turn)


async def sweep(bench: Bench) -> int:
    sweeper = SweepActivities(PostgresSweepStore(bench.database), FakeNotifier(), bench.work, IDLE)
    return (await sweeper.sweep()).work


async def test_only_the_judgement_that_completes_a_batch_notifies_training(bench: Bench) -> None:
    await set_recipe(bench.database, "default", TWO)
    await judge_two(bench)
    assert bench.notifier.waiting == ["default"]
    assert await sweep(bench) == 0
    bench.execute("UPDATE policies SET work_signalled_at = now() - interval '2 minutes'")
    assert await sweep(bench) == 1
    assert bench.notifier.waiting == ["default", "default"]


async def test_while_temporal_is_away_the_batch_is_left_to_the_sweep(bench: Bench) -> None:
    await set_recipe(bench.database, "default", TWO)
    bench.notifier.available = False
    await judge_two(bench)
    (policy,) = bench.rows("SELECT work_waiting, work_signalled_at FROM policies")
    assert policy == {"work_waiting": True, "work_signalled_at": None}
    bench.notifier.available = True
    assert await sweep(bench) == 1
    assert bench.notifier.waiting == ["default"]


async def test_a_batch_that_became_due_by_waiting_is_found_by_the_sweep(bench: Bench) -> None:
    turns = bench.conversation("a", "b")
    session = await bench.insert(*turns)
    await set_recipe(bench.database, "default", BINARY)
    await bench.judge_turn(session, turns[1])
    assert await sweep(bench) == 0
    bench.execute("UPDATE samples SET created_at = now() - interval '25 hours'")
    assert await sweep(bench) == 1
