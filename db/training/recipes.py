"""Stores recipes: inserted once, never changed; each policy refers to the one it learns by."""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.core.errors import RecipeRejected, RecordUnusable
from clawloop.core.recipes.recipe import Lora, Recipe, parse_stored_recipe
from db.content import exact_json
from db.database import Database
from db.lessons.ledger import follow_version
from db.serving.keys import readers_of
from db.tables import PolicyRow, RecipeRow, StepRow, VersionRow
from db.training.policies import insert_event, lock_policy
from db.training.samples import expire_samples_of_other_signal
from db.training.work_flag import refresh_work_flag


async def ensure_recipe(database: Database, policy: str, recipe: Recipe) -> None:
    """Insert a recipe, and make it the policy's if the policy has none.

    Raises:
        StoreUnavailable
    """

    async def ensure(connection: AsyncConnection) -> None:
        await insert_recipe(connection, recipe)
        no_recipe = update(PolicyRow).where(PolicyRow.id == policy, PolicyRow.recipe_hash.is_(None))
        await connection.execute(no_recipe.values(recipe_hash=recipe.hash))

    await database.run(ensure)


async def set_recipe(database: Database, policy: str, recipe: Recipe) -> None:
    """`change_recipe` in a transaction of its own.

    Raises:
        RecipeRejected, RecordUnusable: as `change_recipe`.
        StoreUnavailable
    """

    await database.run(partial(change_recipe, policy=policy, recipe=recipe))


async def change_recipe(connection: AsyncConnection, policy: str, recipe: Recipe) -> None:
    """Insert a recipe, and let the policy learn by it from the next step on; does nothing if it does already.

    Fresh samples of another signal hash expire at once (`recipe changed`), claimed ones when their step is given up.
    Learned lessons come back at once if the recipe retires none.

    Raises:
        RecipeRejected: no step of it can start from the policy's head, or it has lessons for one reader and the policy
            has several.
        RecordUnusable: there is no such policy.
    """
    row = await lock_policy(connection, policy)
    if row.recipe_hash == recipe.hash:
        return
    await _require_shape(connection, row, recipe.train.lora)
    await _require_one_reader(connection, policy, recipe)
    await insert_recipe(connection, recipe)
    changed = update(PolicyRow).where(PolicyRow.id == policy)
    await connection.execute(changed.values(recipe_hash=recipe.hash, rejections=0))
    await expire_samples_of_other_signal(connection, policy)
    await follow_version(connection, policy, row.active)
    await insert_event(connection, policy, "recipe_set", name=recipe.name, hash=recipe.hash, was=row.recipe_hash)
    await refresh_work_flag(connection, policy)


async def _require_shape(connection: AsyncConnection, policy: PolicyRow, lora: Lora) -> None:
    """Raise RecipeRejected unless the next step can start from the head's adapter.

    Otherwise the step would be quarantined, and training paused.
    """
    head_lora = await lora_of_version(connection, policy.id, policy.head)
    if head_lora is not None and (head_lora.rank, head_lora.alpha) != (lora.rank, lora.alpha):
        raise RecipeRejected(
            f"rank {lora.rank} and alpha {lora.alpha:g}, but version {policy.head} of policy {policy.id!r}, from "
            f"which the next step starts, has rank {head_lora.rank} and alpha {head_lora.alpha:g}: keep those, or "
            "start over with `clawloop policy roll-back 0`",
            field="train.lora",
        )


async def _require_one_reader(connection: AsyncConnection, policy: str, recipe: Recipe) -> None:
    if not recipe.lessons.enabled or recipe.lessons.shared:
        return
    readers = await readers_of(connection, policy)
    if len(readers) > 1:
        raise RecipeRejected(
            f"is for one reader, and {len(readers)} keys chat with policy {policy!r} ({', '.join(readers[:3])}, …): who"
            " has one could ask for the lessons of another one's user; give each a policy of its own, revoke the"
            " others, or set lessons.shared = true",
            field="lessons.enabled",
        )


async def lora_of_version(connection: AsyncConnection, policy: str, n: int) -> Lora | None:
    """The shape of a version's adapter, by the recipe of the step that made it, or as it was brought along.

    None: no step made it, as version 0.
    """
    first = aliased(VersionRow)
    query = (
        select(first.lora_rank, first.lora_alpha, RecipeRow.content)
        .select_from(VersionRow)
        .join(
            first,
            (first.policy == func.coalesce(VersionRow.origin_policy, VersionRow.policy))
            & (first.n == func.coalesce(VersionRow.origin_n, VersionRow.n)),
        )
        .outerjoin(StepRow, (StepRow.policy == first.policy) & (StepRow.n == first.n))
        .outerjoin(RecipeRow, RecipeRow.hash == StepRow.recipe_hash)
    )
    made = (await connection.execute(query.where(VersionRow.policy == policy, VersionRow.n == n))).one_or_none()
    if made is None or made.lora_rank is None:
        return None if made is None or made.content is None else _lora_of(made.content)
    return Lora(rank=made.lora_rank, alpha=made.lora_alpha)


async def lora_of_policy(connection: AsyncConnection, policy: str) -> Lora | None:
    """The shape of the adapters that the policy's recipe asks for; None if it has no recipe."""
    query = select(RecipeRow.content).join(PolicyRow, PolicyRow.recipe_hash == RecipeRow.hash)
    content = await connection.scalar(query.where(PolicyRow.id == policy))
    return None if content is None else _lora_of(content)


async def read_recipe_of(database: Database, policy: str) -> Recipe:
    """`recipe_of_policy` in a transaction of its own.

    Raises:
        RecordUnusable, RecipeRejected: as `recipe_of_policy`.
        StoreUnavailable
    """
    return await database.run(partial(recipe_of_policy, policy=policy))


async def recipe_of_policy(connection: AsyncConnection, policy: str) -> Recipe:
    """The recipe a policy learns by.

    Raises:
        RecordUnusable: there is no such policy, or it has no recipe.
        RecipeRejected: the stored recipe was valid when it was set and is not any more.
    """
    query = (
        select(RecipeRow.content).join(PolicyRow, PolicyRow.recipe_hash == RecipeRow.hash).where(PolicyRow.id == policy)
    )
    return require_recipe(policy, await connection.scalar(query))


def require_recipe(policy: str, content: dict[str, Any] | None) -> Recipe:
    """The recipe whose stored content was read; raises as `recipe_of_policy`."""
    if content is None:
        raise RecordUnusable(f"policy {policy!r} has no recipe")
    return parse_stored_recipe(content)


async def recipe_by_hash(connection: AsyncConnection, recipe_hash: str) -> Recipe:
    query = select(RecipeRow.content).where(RecipeRow.hash == recipe_hash)
    return parse_stored_recipe((await connection.execute(query)).scalar_one())


async def insert_recipe(connection: AsyncConnection, recipe: Recipe) -> None:
    await connection.execute(insert(RecipeRow).values(**_columns(recipe)).on_conflict_do_nothing())


def _lora_of(content: Any) -> Lora:
    # Nothing but `lora` is validated: the rest of an old recipe may be invalid by now, and that be why another is set.
    return Lora.model_validate(content["train"]["lora"])


def _columns(recipe: Recipe) -> dict[str, str]:
    return {
        "hash": recipe.hash,
        "name": recipe.name,
        "signal_hash": recipe.signal.hash,
        "train_hash": recipe.train.hash,
        "content": exact_json(recipe.content),
    }
