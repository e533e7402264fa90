"""What operators do to a policy's learning, in PostgreSQL: each in one transaction, with an event.

It holds whoever else is away: claims, commits and activations look at the same row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.algorithms.staleness import path_to_base
from clawloop.contracts.training import SampleState, StepState, TrainingView, VersionView
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecipeRejected, RecordUnusable, RequestRejected
from clawloop.ids import SampleId
from clawloop.recipes.recipe import Recipe
from db.database import Database
from db.events import insert_event
from db.exact_json import storable
from db.serving.activation import is_served, set_active
from db.tables import PolicyRow, SampleRow, StepRow, VersionRow
from db.training.lineage import read_parents
from db.training.queue import lock_policy, refresh_work
from db.training.recipes import read_recipe_of, set_recipe
from db.training.samples import free_samples, set_turn_outcomes
from db.training.status import unusable_words, view_of
from db.training.step_transitions import abandon_step, lock_step

_VERSIONS = text("""
    SELECT v.n, v.parent, v.removed_at, v.created_at, s.metrics,
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


class PostgresTrainingStore:
    """Satisfies `api.ports.TrainingStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def look(self, policy: str) -> TrainingView:
        """
        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy.
        """
        return await self._database.run(partial(_look, policy))

    async def versions(self, policy: str) -> list[VersionView]:
        """All versions there ever were, by number.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy.
        """
        return await self._database.run(partial(_list, policy))

    async def pause(self, policy: str, reason: str) -> TrainingView:
        """No batch is claimed until `resume`; a step that has one finishes.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy.
        """
        return await self._database.run(partial(_pause, policy, reason))

    async def resume(self, policy: str, *, retry_quarantined: bool = False) -> TrainingView:
        """
        Args:
            retry_quarantined: samples that were set aside are fresh again.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy.
        """
        return await self._database.run(partial(_resume, policy, retry_quarantined))

    async def roll_back(self, policy: str, version: int) -> TrainingView:
        """Go on from this version: it is the head, and answers as soon as an engine has it.

        A claimed step is abandoned, a publishing under way is refused (the epoch is another one), and turns trained
        since are rolled back. A later version that was rolled back can be gone on from in the same way.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy or version; 409, its files are gone, or another is pinned.
        """
        return await self._database.run(partial(_roll_back, policy, version))

    async def pin(self, policy: str, version: int) -> TrainingView:
        """Let this version answer, as soon as an engine has it and until `unpin`, whatever is trained.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy or version; 409, its files are gone.
        """
        return await self._database.run(partial(_pin, policy, version))

    async def unpin(self, policy: str) -> TrainingView:
        """Let the newest version answer again; nothing if none is pinned.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy.
        """
        return await self._database.run(partial(_unpin, policy))

    async def recipe(self, policy: str) -> Recipe:
        """What the policy learns by.

        Raises:
            StoreUnavailable
            RequestRejected: 404, there is no such policy, or it has no recipe; 409, that is none any more.
        """
        await self.look(policy)
        try:
            return await read_recipe_of(self._database, storable(policy))
        except RecordUnusable as error:
            raise RequestRejected(f"{error}.", status=404, code="recipe_not_found", field="policy") from error
        except RecipeRejected as error:
            problem = f"Policy {policy!r}: {unusable_words(error)}."
            raise RequestRejected(problem, status=409, code="recipe_unusable") from error

    async def set_recipe(self, policy: str, recipe: Recipe) -> TrainingView:
        """Let the policy learn by this recipe from the next step on; nothing if it does already.

        Waiting samples of another signal hash expire at once, for good: `recipe changed`.

        Raises:
            StoreUnavailable
            RecipeRejected: no step of it can go on from where the policy is.
            RequestRejected: 404, there is no such policy.
        """
        try:
            await set_recipe(self._database, storable(policy), recipe)
        except RecordUnusable as error:
            raise _unknown_policy(policy) from error
        return await self.look(policy)


async def _lock(connection: AsyncConnection, policy: str) -> PolicyRow:
    try:
        return await lock_policy(connection, storable(policy))
    except RecordUnusable as error:
        raise _unknown_policy(policy) from error


def _unknown_policy(policy: str) -> RequestRejected:
    return RequestRejected(f"There is no policy {policy!r}.", status=404, code="policy_not_found", field="policy")


async def _look(policy: str, connection: AsyncConnection) -> TrainingView:
    try:
        return await view_of(connection, storable(policy))
    except RecordUnusable as error:
        raise _unknown_policy(policy) from error


async def _pause(policy: str, reason: str, connection: AsyncConnection) -> TrainingView:
    await _lock(connection, policy)
    paused = {"paused_reason": storable(reason), "paused_at": func.now()}
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(paused))
    await refresh_work(connection, policy)
    await insert_event(connection, policy, "paused", reason=reason)
    return await view_of(connection, policy)


async def _resume(policy: str, retry_quarantined: bool, connection: AsyncConnection) -> TrainingView:
    held = await _lock(connection, policy)
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(paused_reason=None, paused_at=None))
    retried: list[SampleId] = []
    if retry_quarantined:
        aside = select(SampleRow.id).where(SampleRow.policy == policy, SampleRow.state == SampleState.QUARANTINED)
        retried = [SampleId(sample) for sample in await connection.scalars(aside)]
        await free_samples(connection, policy, retried)
    await refresh_work(connection, policy)
    if held.paused_reason is not None or retried:
        await insert_event(connection, policy, "resumed", was=held.paused_reason, retried=len(retried))
    return await view_of(connection, policy)


async def _roll_back(policy: str, version: int, connection: AsyncConnection) -> TrainingView:
    held = await _lock(connection, policy)
    await _with_files(connection, policy, version)
    if held.pinned not in (None, version):
        raise RequestRejected(
            f"Version {held.pinned} of policy {policy!r} is pinned, so {version} could not answer: unpin first.",
            status=409,
            code="version_pinned",
            field="version",
        )
    parents = await read_parents(connection, policy)
    raised = {"head": version, "epoch": held.epoch + 1}
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(raised))
    claimed = select(StepRow.n).where(StepRow.policy == policy, StepRow.state == StepState.CLAIMED)
    if (n := await connection.scalar(claimed)) is not None:
        await abandon_step(connection, await lock_step(connection, policy, n), f"rolled back to version {version}")
    before, after = path_to_base(held.head, parents), path_to_base(version, parents)
    await _tell_path(connection, policy, set(before) - set(after), TurnOutcome.ROLLED_BACK, f"rolled back to {version}")
    await _tell_path(connection, policy, set(after) - set(before), TurnOutcome.TRAINED, None)
    if await is_served(connection, policy, version):  # else chat would wait for an engine to load it
        await set_active(connection, held, version)
    await insert_event(connection, policy, "rolled_back", to=version, head=held.head, active=held.active)
    return await view_of(connection, policy)


async def _tell_path(
    connection: AsyncConnection, policy: str, steps: set[int], outcome: TurnOutcome, then: str | None
) -> None:
    """Tell the turns that these steps trained."""
    for row in await connection.execute(_TRAINED_IN, {"policy": policy, "steps": sorted(steps)}):
        words = row.reason + (f", {then}" if then else "")
        await set_turn_outcomes(connection, row.samples, outcome, words)


async def _pin(policy: str, version: int, connection: AsyncConnection) -> TrainingView:
    held = await _lock(connection, policy)
    await _with_files(connection, policy, version)
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(pinned=version))
    if await is_served(connection, policy, version):
        await set_active(connection, held, version)
    await insert_event(connection, policy, "pinned", version=version, was=held.pinned)
    return await view_of(connection, policy)


async def _unpin(policy: str, connection: AsyncConnection) -> TrainingView:
    held = await _lock(connection, policy)
    if held.pinned is not None:
        await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(pinned=None))
        if await is_served(connection, policy, held.head):
            await set_active(connection, held, held.head)
        await insert_event(connection, policy, "unpinned", version=held.pinned)
    return await view_of(connection, policy)


async def _with_files(connection: AsyncConnection, policy: str, version: int) -> None:
    query = select(VersionRow.removed_at).where(VersionRow.policy == policy, VersionRow.n == version)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        known = f"`clawloop policy versions {policy}` shows them"
        problem = f"Policy {policy!r} has no version {version}; {known}."
        raise RequestRejected(problem, status=404, code="version_not_found", field="version")
    if row.removed_at is not None:
        gone = f"The files of version {version} of policy {policy!r} were removed: choose one that still has them."
        raise RequestRejected(gone, status=409, code="version_removed", field="version")


async def _list(policy: str, connection: AsyncConnection) -> list[VersionView]:
    view = await _look(policy, connection)
    path = path_to_base(view.head, await read_parents(connection, policy))
    rows = await connection.execute(_VERSIONS, {"policy": view.policy})
    return [
        VersionView(
            n=row.n,
            parent=row.parent,
            state=_words(row, view, path),
            active=row.n == view.version,
            pinned=row.n == view.pinned,
            engines=row.engines,
            metrics=row.metrics,
            created_at=row.created_at,
        )
        for row in rows
    ]


def _words(row: Any, view: TrainingView, path: list[int]) -> str:
    place = "head" if row.n == view.head else "on the path" if row.n in path else "rolled back"
    words = ["active"] * (row.n == view.version) + ["pinned"] * (row.n == view.pinned) + [place]
    return ", ".join(words + ["files removed"] * (row.removed_at is not None))
