"""A policy begins from a version of another one, and shares its files, in memory and in PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from clawloop.core.contracts.adapter_directory import AdapterDirectory
from clawloop.core.contracts.training import BroughtAdapter, StepState, VersionOrigin, VersionRef
from clawloop.core.errors import NotFound, RecipeRejected, StateConflict
from clawloop.core.recipes.recipe import Lora
from db.training.policies import versions_of_other_shape
from db.training.status import PostgresTrainingBrowser
from db.training.work_flag import PostgresWorkStore
from tests.contract.learning import POLICY, Learning, PostgresLearning, publish, recipe, reject, step, trained

HOUR = timedelta(hours=1)


async def file_of(learning: Learning, engine: str, policy: str, n: int) -> str:
    """The directory that engines load a wanted version from."""
    (path,) = (one.path for one in await learning.publishing.wanted(engine) if (one.policy, one.n) == (policy, n))
    return path


async def test_a_policy_begins_from_a_version_and_answers_once_an_engine_has_it(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    batch = await step(learning, 1)
    await step(learning, 2)
    view = await learning.operators.create_policy("mine", POLICY, None, 1)
    assert (view.version, view.head, view.step, view.unpublished) == (0, 1, 2, True)
    base, first = await learning.operators.versions("mine")
    assert (base.n, base.origin, first.n, first.parent) == (0, None, 1, 0)
    assert (first.origin, first.state) == (VersionOrigin(POLICY, 1), "head")
    assert await file_of(learning, engine, "mine", 1) == trained(batch).version.path
    assert not await learning.publishing.activate("mine", 1, 0)  # no engine has it under this name
    await learning.publishing.loaded(engine, "mine", 1)
    assert await learning.publishing.activate("mine", 1, 0)
    assert (await learning.operators.status("mine")).unpublished is False
    assert (await learning.operators.status(POLICY)).head == 2


async def test_the_base_model_is_version_0_of_every_policy(learning: Learning) -> None:
    await step(learning, 1)
    view = await learning.operators.create_policy("mine", POLICY, None, 0)
    assert (view.head, view.unpublished) == (0, False)
    assert [version.n for version in await learning.operators.versions("mine")] == [0]


async def test_a_policy_begins_from_an_adapter_that_no_step_made(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    lora = Lora()
    brought = BroughtAdapter("mine/v1-0123456789ab", "ab" * 32, lora.rank, lora.alpha)
    view = await learning.operators.create_policy("mine", POLICY, None, 0, brought)
    assert (view.version, view.head, view.unpublished) == (0, 1, True)
    (_, first) = await learning.operators.versions("mine")
    assert (first.parent, first.origin, first.state) == (0, None, "head")
    assert await file_of(learning, engine, "mine", 1) == brought.path
    await learning.publishing.loaded(engine, "mine", 1)
    assert await learning.publishing.activate("mine", 1, 0)
    assert (await learning.operators.roll_back("mine", 0)).head == 0
    other = replace(brought, rank=lora.rank + 8)
    with pytest.raises(StateConflict, match="rank"):
        await learning.operators.create_policy("other", POLICY, None, 0, other)


async def test_a_version_that_was_begun_from_itself_leads_to_the_step_that_made_it(learning: Learning) -> None:
    await step(learning, 1)
    await step(learning, 2)
    await learning.operators.create_policy("mine", POLICY, None, 2)
    await learning.operators.create_policy("yours", "mine", None, 1)
    (_, first) = await learning.operators.versions("yours")
    assert first.origin == VersionOrigin(POLICY, 2)


async def test_what_no_policy_can_begin_from_makes_none(learning: Learning) -> None:
    await step(learning, 1)
    await step(learning, 2)
    await reject(learning, 3)
    await learning.add_samples(4, version=2)
    await learning.steps.claim(POLICY, 4)
    batch = await learning.steps.batch(POLICY, 4)
    assert await learning.steps.commit(batch, trained(batch)) is StepState.CANDIDATE
    await learning.lose_files(1)
    other_shape = recipe(lora={"rank": 8})
    for version, learned_by, code in (
        (1, None, "version_removed"),
        (3, None, "version_not_accepted"),
        (4, None, "version_not_accepted"),
        (2, other_shape, "recipe_conflict"),
    ):
        with pytest.raises(StateConflict) as raised:
            await learning.operators.create_policy("mine", POLICY, learned_by, version)
        assert (raised.value.code, raised.value.field) == (code, "version")
    with pytest.raises(NotFound) as unknown:
        await learning.operators.create_policy("mine", POLICY, None, 9)
    assert (unknown.value.code, unknown.value.field) == ("version_not_found", "version")
    with pytest.raises(NotFound) as nobody:
        await learning.operators.create_policy("mine", "nobody", None, 2)
    assert nobody.value.code == "policy_not_found"
    with pytest.raises(NotFound):
        await learning.operators.status("mine")
    assert (await learning.operators.create_policy("mine", POLICY, other_shape, 0)).head == 0


async def test_shared_files_stay_until_the_last_policy_needs_them_no_more(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    path = trained(await step(learning, 1)).version.path
    await learning.operators.create_policy("mine", POLICY, None, 1)
    for n in range(2, 7):
        await step(learning, n)
    await publish(learning, 6, engine)
    await learning.age(2 * HOUR)
    directory = AdapterDirectory(POLICY, 1, path)
    assert await learning.publishing.mark_removed(POLICY, 1, HOUR)
    assert await learning.publishing.has_files_at(path)
    assert await learning.publishing.leftover([directory]) == []
    assert await file_of(learning, engine, "mine", 1) == path
    assert not await learning.publishing.mark_removed("mine", 1, HOUR)
    await learning.operators.roll_back("mine", 0)
    assert await learning.publishing.mark_removed("mine", 1, HOUR)
    assert not await learning.publishing.has_files_at(path)
    assert await learning.publishing.leftover([directory]) == [directory]


async def test_training_goes_on_from_the_shared_files(postgres_learning: PostgresLearning) -> None:
    made = trained(await step(postgres_learning, 1)).version
    await postgres_learning.operators.create_policy("mine", POLICY, None, 1)
    mine = postgres_learning
    await mine.add_samples(4, version=1, hinted=[1, 2])
    for table in ("sessions", "samples"):
        await mine.execute(
            f"UPDATE {table} SET policy = 'mine' WHERE id IN (SELECT id FROM {table} ORDER BY id DESC LIMIT 4)"
        )
    assert (await mine.steps.claim("mine", 2)).state is StepState.CLAIMED
    batch = await mine.steps.batch("mine", 2)
    assert batch.parent == VersionRef("mine", 1, 0, made.path, made.sha256)
    assert await mine.steps.commit(batch, trained(batch)) is StepState.CANDIDATE
    assert (await mine.gate.accept("mine", 2))[0] is StepState.COMMITTED
    with pytest.raises(RecipeRejected, match="has rank 16"):
        await mine.operators.set_recipe("mine", recipe(lora={"rank": 8}))
    await mine.operators.roll_back("mine", 1)
    with pytest.raises(RecipeRejected, match="has rank 16"):
        await mine.operators.set_recipe("mine", recipe(lora={"rank": 8}))
    events = await PostgresTrainingBrowser(mine.database).events("mine", 9)
    [created] = [each for each in events if each.kind == "created"]
    assert (created.detail["like"], created.detail["version"]) == (POLICY, 1)


async def test_a_sweep_publishes_it_if_the_signal_was_lost(postgres_learning: PostgresLearning) -> None:
    await step(postgres_learning, 1)
    await postgres_learning.operators.create_policy("mine", POLICY, None, 1)
    assert "mine" in await PostgresWorkStore(postgres_learning.database).pending_work(timedelta(minutes=1))


async def test_hints_of_versions_with_another_shape_are_known_by_the_step_that_made_them(
    postgres_learning: PostgresLearning,
) -> None:
    await step(postgres_learning, 1)
    await postgres_learning.operators.create_policy("mine", POLICY, None, 1)

    async def others(lora: Lora) -> frozenset[int]:
        return await postgres_learning.database.run(lambda it: versions_of_other_shape(it, "mine", lora))

    assert await others(Lora()) == frozenset()
    assert await others(Lora(rank=8)) == {1}
