"""Operators' changes to policies and their training: each is one transaction and records an event."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.algorithms.rewards import path_to_base
from clawloop.core.contracts.training import (
    OPEN_STEPS,
    BroughtAdapter,
    SampleState,
    StepState,
    TrainingView,
    VersionOrigin,
    VersionView,
    gate_seconds,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound, RecipeRejected, RecordUnusable, StateConflict
from clawloop.core.ids import SampleId, version_name
from clawloop.core.recipes.recipe import Recipe
from db.content import exact_json, storable
from db.database import PostgresStore, transaction
from db.episodes.rollouts import end_rollouts
from db.serving.keys import require_one_reader
from db.serving.publishing import is_served, read_version_for_all, set_active
from db.tables import ApiKeyRow, PolicyRow, SampleRow, StepRow, StepSampleRow, VersionRow
from db.training.gate_checks import read_checks
from db.training.policies import insert_event, lock_policy, notify_directory, read_matches, read_parents
from db.training.recipes import change_recipe, insert_recipe, lora_of_policy, lora_of_version, recipe_of_policy
from db.training.samples import free_samples, set_turn_outcomes
from db.training.status import read_status, unusable_recipe
from db.training.steps import abandon_step, end_as_trained, lock_step, mark_dropped
from db.training.work_flag import refresh_work_flag

# Changes --------------------------------------------------------------------------------------------------------------
# Operators' changes to a policy's training: each is one transaction and records an event.
#
# They take effect even while workers are down: claims, commits and activations read the same row.

_VERSIONS = text("""
    SELECT v.n, v.parent, v.removed_at, v.created_at, v.origin_policy, v.origin_n, s.metrics, s.state, s.reason,
        ARRAY(SELECT e.engine_id FROM engine_versions e WHERE e.policy = v.policy AND e.version = v.n
            ORDER BY e.engine_id) AS engines
    FROM versions v LEFT JOIN steps s ON s.policy = v.policy AND s.n = v.n
    WHERE v.policy = :policy ORDER BY v.n
""")
_TRAINED_IN = text("""
    SELECT m.step, s.reason, array_agg(m.sample_id) AS samples
    FROM step_samples m JOIN samples s ON s.id = m.sample_id
    WHERE m.policy = :policy AND m.step = ANY(:steps) AND m.dropped IS NULL
    GROUP BY m.step, s.reason ORDER BY m.step
""")


class PostgresTrainingStore(PostgresStore):
    """Implements `clawloop.operations.training.TrainingStore`."""

    @transaction
    async def status(self, connection: AsyncConnection, policy: str) -> TrainingView:
        return await _read_status(connection, policy)

    @transaction
    async def versions(self, connection: AsyncConnection, policy: str) -> list[VersionView]:
        status = await _read_status(connection, policy)
        path = path_to_base(status.head, await read_parents(connection, policy))
        checks = await read_checks(connection, status.policy)
        matches = await read_matches(connection, status.policy)
        rows = await connection.execute(_VERSIONS, {"policy": status.policy})
        return [
            VersionView(
                n=row.n,
                parent=row.parent,
                state=_version_state(row, status, path),
                active=row.n == status.version,
                pinned=row.n == status.pinned,
                engines=row.engines,
                metrics=row.metrics,
                created_at=row.created_at,
                gate=checks.get(row.n, ()),
                gate_seconds=gate_seconds(checks.get(row.n, ())),
                match=matches.get(row.n),
                origin=None if row.origin_policy is None else VersionOrigin(row.origin_policy, row.origin_n),
            )
            for row in rows
        ]

    @transaction
    async def create_policy(
        self,
        connection: AsyncConnection,
        name: str,
        like: str,
        recipe: Recipe | None,
        version: int = 0,
        brought: BroughtAdapter | None = None,
    ) -> TrainingView:
        row = await _lock(connection, like)
        await _require_files(connection, row.id, version)
        await _require_accepted(connection, row.id, version)
        await create_policy(connection, name, row, recipe, version, brought)
        return await read_status(connection, name)

    @transaction
    async def retire_policy(self, connection: AsyncConnection, policy: str) -> TrainingView:
        await retire_policy(connection, await _lock(connection, policy))
        return await read_status(connection, policy)

    @transaction
    async def pause(self, connection: AsyncConnection, policy: str, reason: str) -> TrainingView:
        await _lock(connection, policy)
        paused = {"paused_reason": storable(reason), "paused_at": func.now()}
        await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(paused))
        await refresh_work_flag(connection, policy)
        await insert_event(connection, policy, "paused", reason=reason)
        return await read_status(connection, policy)

    @transaction
    async def resume(
        self, connection: AsyncConnection, policy: str, *, retry_quarantined: bool = False
    ) -> TrainingView:
        row = await _lock(connection, policy)
        resumed = update(PolicyRow).where(PolicyRow.id == policy)
        await connection.execute(resumed.values(paused_reason=None, paused_at=None, rejections=0))
        retried: list[SampleId] = []
        if retry_quarantined:
            quarantined = [SampleRow.policy == policy, SampleRow.state == SampleState.QUARANTINED]
            samples = await connection.scalars(select(SampleRow.id).where(*quarantined))
            retried = [SampleId(sample) for sample in samples]
            await free_samples(connection, policy, retried)
        await refresh_work_flag(connection, policy)
        if row.paused_reason is not None or retried:
            await insert_event(connection, policy, "resumed", was=row.paused_reason, retried=len(retried))
        return await read_status(connection, policy)

    @transaction
    async def roll_back(
        self, connection: AsyncConnection, policy: str, version: int, recipe: Recipe | None = None
    ) -> TrainingView:
        row = await _lock(connection, policy)
        await _require_files(connection, policy, version)
        await _require_accepted(connection, policy, version)
        _require_unpinned(row, version)
        await continue_from(connection, row, version, f"rolled back to version {version}")
        await insert_event(connection, policy, "rolled_back", to=version, head=row.head, active=row.active)
        if recipe is not None:  # checked against the new head; samples that the open step set free expire with the rest
            await change_recipe(connection, policy, recipe)
        return await read_status(connection, policy)

    @transaction
    async def release(self, connection: AsyncConnection, policy: str, version: int) -> TrainingView:
        row = await _lock(connection, policy)
        await _require_files(connection, policy, version)
        query = select(StepRow.state).where(StepRow.policy == policy, StepRow.n == version)
        state = await connection.scalar(query)
        if state != StepState.REJECTED:
            raise StateConflict(
                f"Version {version} of policy {policy!r} was not rejected ({state or 'no step made it'}): "
                f"`clawloop policy versions --policy {policy}` shows which were.",
                code="version_not_rejected",
                field="version",
            )
        _require_unpinned(row, version)
        step = await lock_step(connection, policy, version)
        await _require_set_aside(connection, step)
        await continue_from(connection, row, version, f"version {version} was released")
        await end_as_trained(connection, step)
        await insert_event(connection, policy, "version_released", version=version, head=row.head, active=row.active)
        return await read_status(connection, policy)

    @transaction
    async def pin(self, connection: AsyncConnection, policy: str, version: int) -> TrainingView:
        row = await _lock(connection, policy)
        await _require_files(connection, policy, version)
        await _require_accepted(connection, policy, version)
        await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(pinned=version))
        if await is_served(connection, policy, version):
            await set_active(connection, row, version)
        if row.canary is not None:  # no conversation gets the canary any more
            await notify_directory(connection, policy)
        await insert_event(connection, policy, "pinned", version=version, was=row.pinned)
        return await read_status(connection, policy)

    @transaction
    async def unpin(self, connection: AsyncConnection, policy: str) -> TrainingView:
        row = await _lock(connection, policy)
        if row.pinned is not None:
            unpinned: dict[str, Any] = {"pinned": None}
            if row.canary is not None:  # no conversation got the canary meanwhile, so its time begins again
                unpinned["canary_since"] = func.now()
                await notify_directory(connection, policy)
            await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(unpinned))
            await insert_event(connection, policy, "unpinned", version=row.pinned)
            row.pinned = None
            if await is_served(connection, policy, version := await read_version_for_all(connection, row)):
                await set_active(connection, row, version)
        return await read_status(connection, policy)

    @transaction
    async def recipe(self, connection: AsyncConnection, policy: str) -> Recipe:
        await _read_status(connection, policy)
        try:
            return await recipe_of_policy(connection, storable(policy))
        except RecordUnusable as error:
            raise NotFound(f"{error}.", code="recipe_not_found", field="policy") from error
        except RecipeRejected as error:
            raise StateConflict(f"Policy {policy!r}: {unusable_recipe(error)}.", code="recipe_unusable") from error

    @transaction
    async def set_recipe(self, connection: AsyncConnection, policy: str, recipe: Recipe) -> TrainingView:
        row = await _lock(connection, policy)
        await change_recipe(connection, row.id, recipe)
        return await read_status(connection, row.id)


async def continue_from(
    connection: AsyncConnection, row: PolicyRow, version: int, why: str, rejections: int = 0
) -> None:
    """Make the version the head in a new epoch; an open step is abandoned, and turns show what is trained now.

    Args:
        rejections: how many steps in a row count as without an accepted version.
    """
    parents = await read_parents(connection, row.id)
    moved = {"head": version, "epoch": row.epoch + 1, "rejections": rejections, "canary": None}
    await connection.execute(update(PolicyRow).where(PolicyRow.id == row.id).values(moved))
    opened = select(StepRow.n).where(StepRow.policy == row.id, StepRow.state.in_(OPEN_STEPS))
    if (n := await connection.scalar(opened)) is not None:
        await abandon_step(connection, await lock_step(connection, row.id, n), why)
    before, after = set(path_to_base(row.head, parents)), set(path_to_base(version, parents))
    await _set_outcomes(connection, row.id, before - after, TurnOutcome.ROLLED_BACK, f", rolled back to {version}")
    await _set_outcomes(connection, row.id, after - before, TurnOutcome.TRAINED, "")
    if await is_served(connection, row.id, version):  # otherwise chat would wait for an engine to load the version
        await set_active(connection, row, version)


def _require_unpinned(row: PolicyRow, version: int) -> None:
    if row.pinned not in (None, version):
        raise StateConflict(
            f"Version {row.pinned} of policy {row.id!r} is pinned, so {version} could not answer: unpin first.",
            code="version_pinned",
            field="version",
        )


async def _require_set_aside(connection: AsyncConnection, step: StepRow) -> None:
    """Raise StateConflict unless the step's samples are as its rejection left them; erased ones are left out."""
    query = (
        select(SampleRow.id, SampleRow.state, SampleRow.reason)
        .join(StepSampleRow, StepSampleRow.sample_id == SampleRow.id)
        .where(StepSampleRow.policy == step.policy, StepSampleRow.step == step.n, StepSampleRow.dropped.is_(None))
    )
    rows = (await connection.execute(query)).all()
    if any(row.state not in (SampleState.QUARANTINED, SampleState.EXPIRED) for row in rows):
        raise StateConflict(
            f"The samples of version {step.n} of policy {step.policy!r} were taken again with `clawloop training "
            "resume --retry`: another version has learned or will learn from them.",
            code="samples_retried",
            field="version",
        )
    expired = {SampleId(row.id): row.reason for row in rows if row.state == SampleState.EXPIRED}
    await mark_dropped(connection, step, expired)


async def _require_accepted(connection: AsyncConnection, policy: str, version: int) -> None:
    query = select(StepRow.state, StepRow.reason).where(StepRow.policy == policy, StepRow.n == version)
    step = (await connection.execute(query)).one_or_none()
    if step is None or step.state == StepState.COMMITTED:
        return
    remedy = {
        StepState.CANDIDATE: "is still at the gate: wait for its decision",
        StepState.REJECTED: f"was {step.reason}; `clawloop policy release {version}` accepts it all the same",
    }.get(StepState(step.state), f"was never accepted ({step.state}: {step.reason}): choose another version")
    raise StateConflict(
        f"Version {version} of policy {policy!r} {remedy}.", code="version_not_accepted", field="version"
    )


async def _lock(connection: AsyncConnection, policy: str) -> PolicyRow:
    try:
        row = await lock_policy(connection, storable(policy))
    except RecordUnusable as error:
        raise _unknown_policy(policy) from error
    if row.retired_at is not None:
        raise StateConflict(f"The policy {policy!r} was retired.", code="policy_retired", field="policy")
    return row


async def _read_status(connection: AsyncConnection, policy: str) -> TrainingView:
    try:
        return await read_status(connection, storable(policy))
    except RecordUnusable as error:
        raise _unknown_policy(policy) from error


def _unknown_policy(policy: str) -> NotFound:
    return NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")


async def _set_outcomes(
    connection: AsyncConnection, policy: str, steps: set[int], outcome: TurnOutcome, suffix: str
) -> None:
    """Set the outcome of the turns that these steps trained, with the suffix after its reason."""
    for row in await connection.execute(_TRAINED_IN, {"policy": policy, "steps": sorted(steps)}):
        await set_turn_outcomes(connection, row.samples, outcome, row.reason + suffix)


async def _require_files(connection: AsyncConnection, policy: str, version: int) -> None:
    query = select(VersionRow.removed_at).where(VersionRow.policy == policy, VersionRow.n == version)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        message = (
            f"Policy {policy!r} has no version {version}; `clawloop policy versions --policy {policy}` lists them."
        )
        raise NotFound(message, code="version_not_found", field="version")
    if row.removed_at is not None:
        message = f"The files of version {version} of policy {policy!r} were removed: choose one that still has them."
        raise StateConflict(message, code="version_removed", field="version")


def version_place(n: int, head: int, path: list[int], state: StepState | None, reason: str | None) -> str:
    """Place of a version: on the path to the head or beside it, or the reason that it was never accepted.

    Args:
        state, reason: of its step; None if no step made it.
    """
    if n == head or n in path:
        return "head" if n == head else "on the path"
    if state is StepState.REJECTED:
        return reason or "rejected"
    return state if state in (StepState.CANDIDATE, StepState.ABANDONED) else "rolled back"


def _version_state(row: Any, status: TrainingView, path: list[int]) -> str:
    place = version_place(row.n, status.head, path, None if row.state is None else StepState(row.state), row.reason)
    named = {"active": status.version, "canary": status.canary, "pinned": status.pinned}
    labels = [name for name, n in named.items() if row.n == n] + [place]
    return ", ".join(labels + ["files removed"] * (row.removed_at is not None))


# New and retired policies ---------------------------------------------------------------------------------------------
# Makes and retires policies: each begins at a base model, and learns by itself.

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
        StateConflict: there is a policy of this name, a version of it would have the base model's name, no step of
            the recipe can start from the version, or it has lessons for one reader and several keys may choose any
            policy.
    """
    if like.base_model.startswith(version_name(name, 1, "")[:-1]):
        raise StateConflict(
            f"The version names of a policy {name!r} could be confused with the base model's name, "
            f"{like.base_model!r}. Take another name.",
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
    await require_one_reader(connection, name)
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
    shape = {"lora_rank": brought.rank, "lora_alpha": brought.alpha}
    first = {"policy": name, "n": 1, "parent": 0, "path": brought.path, "sha256": sha256}
    await connection.execute(insert(VersionRow).values(first | shape))
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
