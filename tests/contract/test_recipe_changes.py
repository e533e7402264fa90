"""A policy continues from its head with another recipe, or the recipe is rejected."""

from __future__ import annotations

import pytest

from clawloop.core.errors import RecipeRejected, StateConflict
from db.training.recipes import read_recipe_of, set_recipe
from tests.contract.learning import POLICY, PostgresLearning, recipe, step


async def test_a_recipe_with_another_lora_than_the_heads_is_rejected(
    postgres_learning: PostgresLearning,
) -> None:
    database, learned = postgres_learning.database, recipe(lora={"rank": 8, "alpha": 16.0})
    await set_recipe(database, POLICY, learned)  # version 0 has no adapter, so any shape begins
    await step(postgres_learning, 1)
    for shape in ({"rank": 16, "alpha": 16.0}, {"rank": 8, "alpha": 32.0}):
        with pytest.raises(
            RecipeRejected, match=r"version 1 of policy 'default'.* has rank 8 and alpha 16: keep those"
        ):
            await set_recipe(database, POLICY, recipe(lora=shape))
    assert await read_recipe_of(database, POLICY) == learned
    await set_recipe(database, POLICY, recipe(lora={"rank": 8, "alpha": 16.0}, batch_samples=2))
    await postgres_learning.operators.roll_back(POLICY, 0)
    await set_recipe(database, POLICY, recipe(lora={"rank": 16, "alpha": 16.0}))


async def test_a_stored_recipe_that_became_invalid_is_reported_until_another_is_set(
    postgres_learning: PostgresLearning,
) -> None:
    await postgres_learning.add_samples(4)
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    await postgres_learning.execute(older)
    claim = await postgres_learning.steps.claim(POLICY, 1)
    assert claim.state is None
    assert "train.train_thinking" in claim.reason
    assert "clawloop recipe set" in claim.reason
    assert (await postgres_learning.steps.status(POLICY)).reason == claim.reason
    assert not await postgres_learning.work_waiting()
    await set_recipe(postgres_learning.database, POLICY, recipe(drift=0.5))
    assert (await postgres_learning.steps.claim(POLICY, 1)).samples == 4


async def test_another_recipe_can_be_set_after_a_step_by_a_recipe_that_became_invalid(
    postgres_learning: PostgresLearning,
) -> None:
    await step(postgres_learning, 1)
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    await postgres_learning.execute(older)
    with pytest.raises(StateConflict, match=r"train\.train_thinking.*clawloop recipe set") as refused:
        await postgres_learning.operators.recipe(POLICY)
    assert refused.value.code == "recipe_unusable"
    with pytest.raises(RecipeRejected, match="has rank 16 and alpha 32: keep those"):
        await set_recipe(postgres_learning.database, POLICY, recipe(lora={"rank": 8}))
    await set_recipe(postgres_learning.database, POLICY, recipe(drift=0.5))


async def test_a_hint_for_an_adapter_of_another_shape_is_dropped_and_the_verdict_trained(
    postgres_learning: PostgresLearning,
) -> None:
    await step(postgres_learning, 1)
    judged = await postgres_learning.add_samples(3, version=1, hinted=[1, 2])
    unjudged = await postgres_learning.add_samples(1, version=1, reward=None, hinted=[1, 2])
    plain = await postgres_learning.add_samples(1)
    await postgres_learning.operators.roll_back(POLICY, 0)
    await set_recipe(postgres_learning.database, POLICY, recipe(lora={"rank": 8, "alpha": 16.0}))
    await postgres_learning.steps.claim(POLICY, 2)
    batch = await postgres_learning.steps.batch(POLICY, 2)
    assert batch.teachers == {}
    assert [(one.sample_id, one.hinted_prompt_ids) for one in batch.samples] == [
        (sample, None) for sample in (*judged, *plain)
    ]
    shape = "version 1, which answered, has a LoRA of another shape"
    assert batch.without_hint == dict.fromkeys(judged, shape)
    assert (await postgres_learning.sample_result(*unjudged))[
        2
    ] == "version 1, which answered, is gone: its hint cannot be read"
