"""Makes policies: each begins at a base model, and learns by itself."""

from __future__ import annotations

from sqlalchemy import insert, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import StateConflict
from clawloop.ids import version_name
from clawloop.recipes.recipe import Recipe
from db.exact_json import exact_json
from db.tables import PolicyRow, VersionRow
from db.training.policies import insert_event
from db.training.recipes import insert_recipe


async def create_policy(connection: AsyncConnection, name: str, like: PolicyRow, recipe: Recipe | None) -> None:
    """Insert a policy with the base model, aliases, sampling and trainers of another one, and its version 0.

    Args:
        recipe: None takes that of `like`.

    Raises:
        StateConflict: there is a policy of this name, or a version of it would have the base model's name.
    """
    if like.base_model.startswith(version_name(name, 1, "")[:-1]):
        raise StateConflict(
            f"Versions of a policy {name!r} could not be told from the base model {like.base_model!r}. "
            "Take another name.",
            code="policy_name_unusable",
            field="name",
        )
    new = postgresql.insert(PolicyRow).values(
        id=name,
        base_model=like.base_model,
        aliases=like.aliases,
        sampling=exact_json(like.sampling),
        head=0,
        active=0,
        pool=like.pool,
        recipe_hash=like.recipe_hash,
    )
    made = await connection.scalar(new.on_conflict_do_nothing().returning(PolicyRow.id))
    if made is None:
        raise StateConflict(f"There is a policy {name!r} already.", code="policy_exists", field="name")
    await connection.execute(insert(VersionRow).values(policy=name, n=0))
    if recipe is not None:
        await insert_recipe(connection, recipe)
        await connection.execute(update(PolicyRow).where(PolicyRow.id == name).values(recipe_hash=recipe.hash))
    await insert_event(connection, name, "created", like=like.id, recipe=None if recipe is None else recipe.hash)
