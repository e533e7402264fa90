"""What a database needs before a gateway can serve from it: schema, default policy and recipe, engines, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from clawloop.contracts.serving import Scope
from clawloop.errors import RecipeRejected, SetupError
from clawloop.recipes.checks import require_rank
from clawloop.recipes.recipe import Recipe
from db.database import BACKGROUND_LIMIT, Database
from db.schema import migrate
from db.serving.directory import ensure_policy
from db.serving.engines import add_engine, ensure_engines
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe, read_recipe_of, set_recipe

DEFAULT_POLICY = "default"
DEFAULT_RECIPE = Recipe(name="combined")
"""The same as deploy/recipes/combined.toml; what a new policy learns by."""


async def prepare(
    url: str,
    base_model: str,
    aliases: Sequence[str],
    engines: Sequence[str],
    secrets: Mapping[str, str],
    added_by: str = "clawloop up",
    recipe: Recipe | None = None,
    max_lora_rank: int = 16,
) -> dict[str, str]:
    """Bring a database to the state a gateway needs: schema, default policy and recipe, engines, a key of each scope.

    Args:
        base_model: the name under which the engines serve version 0.
        aliases: further names for `policy`.
        engines: URLs; of the engines that `added_by` added exactly these stay.
        secrets: keys by scope that earlier starts made.
        added_by: the installation, where several share the database.
        recipe: what the default policy learns by from now on; None: as before.
        max_lora_rank: of the adapters that engines take.

    Returns:
        A good key for each scope: the given one where it still is, else a new one.

    Raises:
        SetupError, StoreUnavailable
        RecipeRejected: no engine could load, or no trainer compute, what this recipe makes.
    """
    await asyncio.to_thread(migrate, url)
    database = Database(url, BACKGROUND_LIMIT)
    try:
        await ensure_policy(database, DEFAULT_POLICY, base_model, aliases)
        await ensure_recipe(database, DEFAULT_POLICY, DEFAULT_RECIPE)
        require_rank(recipe or await _stored_recipe(database), max_lora_rank)
        if recipe is not None:
            await set_recipe(database, DEFAULT_POLICY, recipe)
        await ensure_engines(database, engines, added_by)
        return {scope: await _ensure_key(PostgresKeyStore(database), scope, secrets.get(scope)) for scope in Scope}
    finally:
        await database.close()


async def _stored_recipe(database: Database) -> Recipe:
    try:
        return await read_recipe_of(database, DEFAULT_POLICY)
    except RecipeRejected as error:
        raise SetupError(
            f"the recipe of policy {DEFAULT_POLICY!r} cannot be used any more: {error}; start once with another, "
            "--recipe FILE"
        ) from error


async def _ensure_key(store: PostgresKeyStore, scope: Scope, secret: str | None) -> str:
    if secret is not None and await store.authenticate(secret) is not None:
        return secret
    _, made = await store.create_key(DEFAULT_POLICY, frozenset({scope}), name=f"made by clawloop up for {scope}")
    return made


async def begin(url: str, base_model: str, aliases: Sequence[str], engines: Sequence[str]) -> None:
    """Make the default policy with its recipe, and engines, so that a deployment without `up` can begin.

    Raises:
        SetupError, StoreUnavailable
    """
    database = Database(url, BACKGROUND_LIMIT)
    try:
        await ensure_policy(database, DEFAULT_POLICY, base_model, aliases)
        await ensure_recipe(database, DEFAULT_POLICY, DEFAULT_RECIPE)
        for engine in engines:
            await add_engine(database, engine)
    finally:
        await database.close()
