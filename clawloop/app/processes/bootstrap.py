"""Prepares a database for a gateway: schema, default policy and recipe, engines, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawloop.app.processes.operations import check_engines
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, Recipe, require_decoupled, require_rank
from db.content import PLAIN, ContentCodec
from db.database import BACKGROUND_LIMIT, Database
from db.schema import migrate
from db.serving.directory import ensure_policy
from db.serving.engines import add_missing_engines, engine_of, ensure_engines
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe, read_recipe_of, set_recipe

DEFAULT_POLICY = "default"


async def prepare(
    url: str,
    base_model: str,
    aliases: Sequence[str],
    engines: Sequence[str],
    secrets: Mapping[str, str],
    added_by: str = "clawloop up",
    recipe: Recipe | None = None,
    max_lora_rank: int = 16,
    quantised: bool = False,
    content: ContentCodec = PLAIN,
    first_recipe: Recipe = DEFAULT_RECIPE,
) -> dict[str, str]:
    """Migrate the schema, and insert what is missing: default policy and recipe, engines, a key for each scope.

    Args:
        base_model: the name under which the engines serve version 0.
        aliases: further model names of the policy.
        engines: URLs; other engines added by `added_by` are removed.
        secrets: keys by scope, created by earlier starts.
        added_by: the installation, since several may share the database.
        recipe: the default policy's recipe from now on; None: unchanged.
        max_lora_rank: highest rank of an adapter that the engines can load.
        quantised: engines and trainer compute with different weights, which the recipe has to allow.
        content: how conversations are stored.
        first_recipe: of the default policy if it has none yet.

    Returns:
        A valid key for each scope: the given one if it is still valid, else a new one.

    Raises:
        SetupError, StoreUnavailable
        RecipeRejected: the engines cannot load adapters of this recipe, or the trainer cannot compute it.
    """
    await asyncio.to_thread(migrate, url)
    database = Database(url, BACKGROUND_LIMIT, content)
    try:
        await ensure_policy(database, DEFAULT_POLICY, base_model, aliases)
        await ensure_recipe(database, DEFAULT_POLICY, first_recipe)
        used = recipe or await _stored_recipe(database)
        require_rank(used, max_lora_rank)
        if quantised:
            require_decoupled(
                used,
                "engines and trainer compute with different weights",
                "in a recipe and start once with --recipe FILE, e.g. deploy/recipes/quantised.toml",
            )
        if recipe is not None:
            await set_recipe(database, DEFAULT_POLICY, recipe)
        await ensure_engines(database, engines, added_by)
        store, made = PostgresKeyStore(database), (Scope.CHAT, Scope.ADMIN)
        return {scope: await _ensure_key(store, scope, secrets.get(scope)) for scope in made}
    finally:
        await database.close()


async def _stored_recipe(database: Database) -> Recipe:
    try:
        return await read_recipe_of(database, DEFAULT_POLICY)
    except RecipeRejected as error:
        raise SetupError(
            f"the recipe of policy {DEFAULT_POLICY!r} cannot be used any more: {error}; "
            "start once with another recipe, --recipe FILE"
        ) from error


async def _ensure_key(store: PostgresKeyStore, scope: Scope, secret: str | None) -> str:
    if secret is not None and await store.authenticate(secret) is not None:
        return secret
    _, created = await store.create_key(DEFAULT_POLICY, frozenset({scope}), name=f"made by clawloop up for {scope}")
    return created


async def create_default_policy(
    url: str,
    base_model: str,
    aliases: Sequence[str],
    engines: Sequence[str],
    model: Path | None = None,
    engine_secret: str | None = None,
    content: ContentCodec = PLAIN,
) -> list[str]:
    """Insert the default policy with its recipe, and engines; for a deployment without `clawloop up`.

    Idempotent: it runs at every deployment, and an engine that a person drained stays drained.

    Args:
        model: CLAWLOOP_MODEL, compared with the engines.
        engine_secret: of the engines; None: they have none.
        content: how conversations are stored.

    Returns:
        A line for each engine that does not answer yet.

    Raises:
        SetupError, StoreUnavailable
    """
    database = Database(url, BACKGROUND_LIMIT, content)
    try:
        await ensure_policy(database, DEFAULT_POLICY, base_model, aliases)
        await ensure_recipe(database, DEFAULT_POLICY, DEFAULT_RECIPE)
        silent = await check_engines(database, [engine_of(engine)[1] for engine in engines], model, engine_secret)
        await add_missing_engines(database, engines, added_by=None)
        return silent
    finally:
        await database.close()
