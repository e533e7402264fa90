"""Makes and retires policies: each begins at a base model, and learns by itself."""

from __future__ import annotations

from pydantic import JsonValue
from sqlalchemy import func, insert, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import BroughtAdapter
from clawloop.errors import StateConflict
from clawloop.ids import version_name
from clawloop.recipes.recipe import Recipe
from db.episodes.rollouts import end_rollouts
from db.exact_json import exact_json
from db.tables import ApiKeyRow, PolicyRow, VersionRow
from db.training.policies import insert_event
from db.training.recipes import insert_recipe, lora_of_policy, lora_of_version
from db.training.work_flag import refresh_work_flag

_RETIRED = "the policy is retired"


async def create_policy(
    connection: AsyncConnection,
    name: str,
    like: PolicyRow,
    recipe: Recipe | None,
    version: int = 0,
    brought: BroughtAdapter | None = None,
) -> None:
    """Insert a policy with the base model, aliases, sampling and trainers of another policy, and its version 0.

    Args:
        recipe: None takes that of `like`.
        version: an accepted version of `like` with files, from which the policy begins; 0: the base model.
        brought: what it begins from in place of a version.

    Raises:
        StateConflict: there is a policy of this name, a version of it would have the base model's name, or no step of
            the recipe can start from the version.
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
    if version:
        await _begin_from(connection, name, like, version)
    detail: dict[str, JsonValue] = {"like": like.id, "version": version or None}
    detail |= {"recipe": None if recipe is None else recipe.hash}
    if brought is not None:
        await _begin_with(connection, name, brought)
        detail |= {"adapter": brought.sha256}
    await insert_event(connection, name, "created", **detail)


async def _begin_from(connection: AsyncConnection, name: str, like: PolicyRow, version: int) -> None:
    """Make the files of a version of `like` the new policy's version 1 and head.

    The two share one directory. Engines load it under the new policy's name, and it answers once one has it.
    """
    query = select(VersionRow.path, VersionRow.sha256, VersionRow.origin_policy, VersionRow.origin_n)
    found = (await connection.execute(query.where(VersionRow.policy == like.id, VersionRow.n == version))).one()
    origin = (like.id, version) if found.origin_policy is None else (found.origin_policy, found.origin_n)
    first = {"policy": name, "n": 1, "parent": 0, "path": found.path, "sha256": found.sha256}
    await connection.execute(insert(VersionRow).values(first | {"origin_policy": origin[0], "origin_n": origin[1]}))
    await connection.execute(update(PolicyRow).where(PolicyRow.id == name).values(head=1))
    made, learns = await lora_of_version(connection, name, 1), await lora_of_policy(connection, name)
    if made is not None and learns is not None and (made.rank, made.alpha) != (learns.rank, learns.alpha):
        raise StateConflict(
            f"Version {version} of policy {like.id!r} has rank {made.rank} and alpha {made.alpha:g}, the recipe of "
            f"{name!r} has rank {learns.rank} and alpha {learns.alpha:g}: take a recipe with those of the version, or "
            "another version.",
            code="recipe_conflict",
            field="version",
        )


async def _begin_with(connection: AsyncConnection, name: str, brought: BroughtAdapter) -> None:
    """Make an adapter's files the new policy's version 1 and head; no step and no other policy made them."""
    sha256 = bytes.fromhex(brought.sha256)
    await connection.execute(insert(VersionRow).values(policy=name, n=1, parent=0, path=brought.path, sha256=sha256))
    await connection.execute(update(PolicyRow).where(PolicyRow.id == name).values(head=1))
    learns = await lora_of_policy(connection, name)
    if learns is not None and (brought.rank, brought.alpha) != (learns.rank, learns.alpha):
        raise StateConflict(
            f"The adapter has r {brought.rank} and lora_alpha {brought.alpha:g}, the recipe of {name!r} has rank "
            f"{learns.rank} and alpha {learns.alpha:g}: take a recipe with those of the adapter under [train.lora].",
            code="recipe_conflict",
            field="recipe",
        )


async def retire_policy(connection: AsyncConnection, policy: PolicyRow) -> None:
    """End a policy for good: its keys are revoked, it claims no batch, its rollouts end, engines unload its versions.

    Its sessions, samples and newest versions stay.

    Raises:
        StateConflict: it is the policy that every installation has.
    """
    if policy.id == "default":
        raise StateConflict(
            "The policy 'default' is that of this installation, and cannot be retired. Pause its training instead.",
            code="policy_needed",
            field="policy",
        )
    ended = {"retired_at": func.now(), "paused_reason": _RETIRED, "paused_at": func.now()}
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy.id).values(ended))
    valid = update(ApiKeyRow).where(ApiKeyRow.policy == policy.id, ApiKeyRow.revoked_at.is_(None))
    await connection.execute(valid.values(revoked_at=func.now()))
    await end_rollouts(connection, policy.id, _RETIRED)
    await refresh_work_flag(connection, policy.id)
    await insert_event(connection, policy.id, "retired", head=policy.head, active=policy.active)
