"""Recipes in PostgreSQL: entered once, never changed; each policy points to the one it learns by."""

from __future__ import annotations

from functools import partial

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import RecipeRejected, RecordUnusable
from clawloop.recipes.recipe import Lora, Recipe, parse_stored_recipe
from db.database import Database
from db.events import insert_event
from db.exact_json import exact_json
from db.tables import PolicyRow, RecipeRow, StepRow
from db.training.queue import lock_policy, refresh_work
from db.training.samples import expire_other_signals


async def ensure_recipe(database: Database, policy: str, recipe: Recipe) -> None:
    """Enter a recipe, and make it the policy's if that has none.

    Raises:
        StoreUnavailable
    """

    async def ensure(connection: AsyncConnection) -> None:
        await connection.execute(insert(RecipeRow).values(**_columns(recipe)).on_conflict_do_nothing())
        without = update(PolicyRow).where(PolicyRow.id == policy, PolicyRow.recipe_hash.is_(None))
        await connection.execute(without.values(recipe_hash=recipe.hash))

    await database.run(ensure)


async def set_recipe(database: Database, policy: str, recipe: Recipe) -> None:
    """Enter a recipe, and let the policy learn by it from the next step on; nothing if it does already.

    Waiting samples of another signal hash expire at once, for good: `recipe changed`; those a step holds, when it is
    given up.

    Raises:
        RecipeRejected: no step of it can go on from where the policy is.
        RecordUnusable: there is no such policy.
        StoreUnavailable
    """

    async def change(connection: AsyncConnection) -> None:
        held = await lock_policy(connection, policy)
        if held.recipe_hash == recipe.hash:
            return
        await _require_shape(connection, held, recipe.train.lora)
        await connection.execute(insert(RecipeRow).values(**_columns(recipe)).on_conflict_do_nothing())
        await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(recipe_hash=recipe.hash))
        await expire_other_signals(connection, policy)
        await insert_event(connection, policy, "recipe_set", name=recipe.name, hash=recipe.hash, was=held.recipe_hash)
        await refresh_work(connection, policy)

    await database.run(change)


async def _require_shape(connection: AsyncConnection, policy: PolicyRow, asked: Lora) -> None:
    """Raise RecipeRejected unless the next step can go on from the head's adapter.

    Without this the step would be quarantined, its samples set aside and training paused.
    """
    made_by = select(RecipeRow.content).join(StepRow, StepRow.recipe_hash == RecipeRow.hash)
    content = await connection.scalar(made_by.where(StepRow.policy == policy.id, StepRow.n == policy.head))
    if content is None:  # version 0 has no adapter
        return
    # No other key: that recipe may be none any more, which is why another is set.
    has = Lora.model_validate(content["train"]["lora"])
    if (has.rank, has.alpha) != (asked.rank, asked.alpha):
        raise RecipeRejected(
            f"rank {asked.rank} and alpha {asked.alpha:g}, but version {policy.head} of policy {policy.id!r}, from "
            f"which it learns on, has rank {has.rank} and alpha {has.alpha:g}: keep those, or begin anew with "
            "`clawloop policy roll-back 0`",
            field="train.lora",
        )


async def read_recipe_of(database: Database, policy: str) -> Recipe:
    """
    Raises:
        RecordUnusable: there is no such policy, or it has no recipe.
        RecipeRejected: it was good when it was set, and is none any more.
        StoreUnavailable
    """
    return await database.run(partial(_recipe_of, policy))


async def _recipe_of(policy: str, connection: AsyncConnection) -> Recipe:
    return await recipe_of_policy(connection, policy)


async def recipe_of_policy(connection: AsyncConnection, policy: str) -> Recipe:
    """
    Raises:
        RecordUnusable: the policy has no recipe.
        RecipeRejected: it was good when it was set, and is none any more.
    """
    query = (
        select(RecipeRow.content).join(PolicyRow, PolicyRow.recipe_hash == RecipeRow.hash).where(PolicyRow.id == policy)
    )
    content = await connection.scalar(query)
    if content is None:
        raise RecordUnusable(f"policy {policy!r} has no recipe")
    return parse_stored_recipe(content)


async def recipe_by_hash(connection: AsyncConnection, recipe_hash: str) -> Recipe:
    query = select(RecipeRow.content).where(RecipeRow.hash == recipe_hash)
    return parse_stored_recipe((await connection.execute(query)).scalar_one())


def _columns(recipe: Recipe) -> dict[str, str]:
    return {
        "hash": recipe.hash,
        "name": recipe.name,
        "signal_hash": recipe.signal.hash,
        "train_hash": recipe.train.hash,
        "content": exact_json(recipe.content),
    }
