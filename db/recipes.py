"""Recipes in PostgreSQL: entered once, never changed; each policy points to the one it learns by."""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import RecordUnusable
from clawloop.recipe import Recipe, parse_recipe
from db.engine import Database
from db.exact_json import exact_json
from db.tables import Policy
from db.tables import Recipe as RecipeRow


async def ensure_recipe(database: Database, policy: str, recipe: Recipe) -> None:
    """Enter a recipe, and make it the policy's if that has none.

    Raises:
        StoreUnavailable
    """

    async def ensure(connection: AsyncConnection) -> None:
        await connection.execute(insert(RecipeRow).values(**_columns(recipe)).on_conflict_do_nothing())
        without = update(Policy).where(Policy.id == policy, Policy.recipe_hash.is_(None))
        await connection.execute(without.values(recipe_hash=recipe.hash))

    await database.run(ensure)


async def recipe_of_policy(connection: AsyncConnection, policy: str) -> Recipe:
    """
    Raises:
        RecordUnusable: the policy has no recipe.
    """
    query = select(RecipeRow.content).join(Policy, Policy.recipe_hash == RecipeRow.hash).where(Policy.id == policy)
    content = await connection.scalar(query)
    if content is None:
        raise RecordUnusable(f"policy {policy!r} has no recipe")
    return parse_recipe(content)


async def recipe_by_hash(connection: AsyncConnection, recipe_hash: str) -> Recipe:
    query = select(RecipeRow.content).where(RecipeRow.hash == recipe_hash)
    return parse_recipe((await connection.execute(query)).scalar_one())


def _columns(recipe: Recipe) -> dict[str, str]:
    return {
        "hash": recipe.hash,
        "name": recipe.name,
        "signal_hash": recipe.signal.hash,
        "train_hash": recipe.train.hash,
        "content": exact_json(recipe.model_dump(mode="json")),
    }
