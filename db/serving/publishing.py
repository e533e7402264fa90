"""Versions in PostgreSQL: which one engines should have, have loaded, and which one is active."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import TextClause, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.algorithms.rewards import path_to_base
from clawloop.core.contracts.serving import AdapterDirectory, Engine
from clawloop.core.contracts.training import StepState, VersionRef
from clawloop.core.errors import RecordUnusable
from clawloop.core.gate.canary import version_for_all
from clawloop.core.recipes.recipe import Train
from db.content import storable
from db.database import PostgresStore, transaction
from db.lessons.ledger import follow_version
from db.serving.engines import read_engines
from db.tables import EngineRow, EngineVersionRow, PolicyRow, StepRow, VersionRow
from db.training.policies import lock_policy, notify_directory, read_parents, version_ref

# Activation -----------------------------------------------------------------------------------------------------------
# Changes a policy's active version and notifies gateways, in the caller's transaction.
#
# The caller must hold the policy's lock.


async def is_served(connection: AsyncConnection, policy: str, n: int) -> bool:
    """True if an engine that takes requests has loaded this version; every engine has version 0.

    An engine's `problem` does not count: an engine that does not answer has no rows in `engine_versions`, and an engine
    that cannot load the active version must not prevent another version from replacing it.
    """
    if n == 0:
        return True
    loaded = (
        select(EngineVersionRow.engine_id)
        .join(EngineRow, EngineRow.id == EngineVersionRow.engine_id)
        .where(EngineVersionRow.policy == policy, EngineVersionRow.version == n)
        .where(~EngineRow.draining)
    )
    return bool(await connection.scalar(select(loaded.exists())))


async def read_version_for_all(connection: AsyncConnection, policy: PolicyRow) -> int:
    """The version that should be active."""
    parent = None if policy.canary is None else await canary_parent(connection, policy.id, policy.canary)
    return version_for_all(policy.head, policy.pinned, parent)


async def canary_parent(connection: AsyncConnection, policy: str, canary: int) -> int:
    """The version that the conversations get which do not get the canary."""
    query = select(VersionRow.parent).where(VersionRow.policy == policy, VersionRow.n == canary)
    return (await connection.execute(query)).scalar_one() or 0


async def set_active(connection: AsyncConnection, policy: PolicyRow, n: int) -> None:
    """Make version `n` the active one. Lessons that it has learned leave the prompt, others come back."""
    if policy.active == n:
        return
    versions = update(VersionRow).where(VersionRow.policy == policy.id)
    await connection.execute(versions.where(VersionRow.n == policy.active).values(retired_at=func.now()))
    await connection.execute(versions.where(VersionRow.n == n).values(activated_at=func.now(), retired_at=None))
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy.id).values(active=n))
    await follow_version(connection, policy.id, n)
    await notify_directory(connection, policy.id)


# Publishing -----------------------------------------------------------------------------------------------------------
# Stores which versions engines should have and have loaded, which one is active, and which files may be removed.

# A candidate is loaded before it is accepted: it can then be asked, and answers at once.
# The parent of a canary answers the others, and again once a pin ends.
_WANTED = """(v.n IN (p.head, p.active, p.pinned) OR v.wanted_until > now() OR EXISTS (
        SELECT FROM steps c WHERE c.policy = v.policy AND c.n = v.n AND c.state = 'candidate')
        OR EXISTS (SELECT FROM versions c WHERE c.policy = v.policy AND c.n = p.canary AND c.parent = v.n))
    AND v.n > 0 AND v.removed_at IS NULL AND p.retired_at IS NULL"""
_WANTED_VERSIONS = text(f"""
    SELECT v.* FROM versions v JOIN policies p ON p.id = v.policy WHERE {_WANTED} ORDER BY v.created_at, v.policy, v.n
""")
# A version that was never active may have been about to be activated, hence `loaded_at`.
_UNLOADABLE = text(f"""
    SELECT v.* FROM engine_versions e JOIN versions v ON v.policy = e.policy AND v.n = e.version
        JOIN policies p ON p.id = v.policy
    WHERE e.engine_id = :engine AND v.n > 0 AND NOT coalesce({_WANTED}, false)
        AND greatest(v.retired_at, e.loaded_at) <= now() - CAST(:age AS interval)
    ORDER BY v.created_at, v.policy, v.n
""")
# Waiting samples may need the version that answered them to score their hinted prompt, and so may turns not yet judged.
_REMOVABLE = text(f"""
    SELECT v.* FROM versions v JOIN policies p ON p.id = v.policy
    WHERE v.n > 0 AND v.removed_at IS NULL AND NOT coalesce({_WANTED}, false)
        AND v.created_at <= now() - CAST(:age AS interval)
        AND coalesce(v.retired_at <= now() - CAST(:age AS interval), true)
        AND NOT EXISTS (SELECT FROM engine_versions e WHERE e.policy = v.policy AND e.version = v.n)
        AND NOT EXISTS (SELECT FROM steps s WHERE s.policy = v.policy AND s.parent = v.n
            AND s.state IN ('claimed', 'candidate'))
        AND NOT EXISTS (
            SELECT FROM samples s JOIN turns t ON t.id = s.turn_id
            WHERE s.policy = v.policy AND s.state IN ('fresh', 'claimed') AND s.hinted_prompts IS NOT NULL
                AND t.version = v.n)
        AND NOT EXISTS (
            SELECT FROM turns t JOIN sessions c ON c.id = t.session_id
            WHERE t.outcome = 'waiting' AND c.policy = v.policy AND t.version = v.n)
    ORDER BY v.policy, v.n
""")

# The newest on the path to the head: a roll-back most likely chooses one of them.
_KEPT = text(f"""
    SELECT p.head, coalesce(CAST(r.content->'train'->>'kept_versions' AS int), {Train().kept_versions}) AS versions
    FROM policies p LEFT JOIN recipes r ON r.hash = p.recipe_hash WHERE p.id = :policy
""")
_LEFTOVER = text("""
    SELECT d.path FROM unnest(CAST(:policies AS text[]), CAST(:ns AS int[]), CAST(:paths AS text[])) d (policy, n, path)
        LEFT JOIN steps s ON s.policy = d.policy AND s.n = d.n
    WHERE (s.state <> 'claimed'
            OR EXISTS (SELECT FROM versions v WHERE v.path = d.path AND v.lora_rank IS NOT NULL))
        AND NOT EXISTS (SELECT FROM versions v WHERE v.path = d.path AND v.removed_at IS NULL)
""")


class PostgresPublishingStore(PostgresStore):
    """Implements `activities.serving.publishing.PublishingStore`."""

    @transaction
    async def engines(self, connection: AsyncConnection) -> list[Engine]:
        return await read_engines(connection)

    @transaction
    async def wanted(self, connection: AsyncConnection, engine_id: str) -> list[VersionRef]:
        return await _versions(connection, _WANTED_VERSIONS)

    @transaction
    async def want_for(
        self, connection: AsyncConnection, policy: str, versions: Sequence[int], how_long: timedelta
    ) -> None:
        # A removal of files takes the same lock: either it sees this, or the version is not loaded.
        await lock_policy(connection, policy)
        own = update(VersionRow).where(VersionRow.policy == policy)
        await connection.execute(
            own.where(VersionRow.wanted_until.is_not(None), VersionRow.n.not_in(versions)).values(wanted_until=None)
        )
        await connection.execute(own.where(VersionRow.n.in_(versions)).values(wanted_until=func.now() + how_long))

    @transaction
    async def loaded(self, connection: AsyncConnection, engine_id: str, policy: str, n: int) -> None:
        row = {"engine_id": engine_id, "policy": policy, "version": n}
        await connection.execute(insert(EngineVersionRow).on_conflict_do_nothing(), row)

    @transaction
    async def unloaded(self, connection: AsyncConnection, engine_id: str, policy: str, n: int) -> None:
        row = [
            EngineVersionRow.engine_id == engine_id,
            EngineVersionRow.policy == policy,
            EngineVersionRow.version == n,
        ]
        await connection.execute(delete(EngineVersionRow).where(*row))

    @transaction
    async def forget(self, connection: AsyncConnection, engine_id: str) -> None:
        await connection.execute(delete(EngineVersionRow).where(EngineVersionRow.engine_id == engine_id))

    @transaction
    async def report(self, connection: AsyncConnection, engine_id: str, problem: str | None) -> None:
        row = update(EngineRow).where(EngineRow.id == engine_id)
        await connection.execute(row.values(problem=None if problem is None else storable(problem)))

    @transaction
    async def activate(self, connection: AsyncConnection, policy: str, n: int, epoch: int) -> bool:
        row = await lock_policy(connection, policy)
        if row.epoch != epoch or row.pinned not in (None, n):
            return False
        if row.active == n:
            return True
        parents = await read_parents(connection, policy)
        if n != 0 and n not in parents:
            raise RecordUnusable(f"policy {policy!r} has no version {n}")
        # The caller's view may be older than the head; a canary is not for all.
        is_next = n != row.canary and is_forward(row, n, parents)
        if not is_next and n != await read_version_for_all(connection, row):
            return False
        if not await is_served(connection, policy, n):
            return False
        await set_active(connection, row, n)
        return True

    @transaction
    async def unloadable(self, connection: AsyncConnection, engine_id: str, age: timedelta) -> list[VersionRef]:
        return await _versions(connection, _UNLOADABLE, engine=engine_id, age=age)

    @transaction
    async def removable(self, connection: AsyncConnection, age: timedelta) -> list[VersionRef]:
        return await _removable(connection, age)

    @transaction
    async def mark_removed(self, connection: AsyncConnection, policy: str, n: int, age: timedelta) -> bool:
        # Roll-backs, pins and claims take the same lock: either they see the removal, or it sees what they need.
        await lock_policy(connection, policy)
        if not any((version.policy, version.n) == (policy, n) for version in await _removable(connection, age)):
            return False
        row = update(VersionRow).where(VersionRow.policy == policy, VersionRow.n == n)
        await connection.execute(row.values(removed_at=func.now()))
        return True

    @transaction
    async def has_files_at(self, connection: AsyncConnection, path: str) -> bool:
        kept = select(VersionRow.n).where(VersionRow.path == path, VersionRow.removed_at.is_(None))
        return bool(await connection.scalar(select(kept.exists())))

    @transaction
    async def leftover(
        self, connection: AsyncConnection, directories: Sequence[AdapterDirectory]
    ) -> list[AdapterDirectory]:
        parameters = {
            "policies": [directory.policy for directory in directories],
            "ns": [directory.n for directory in directories],
            "paths": [directory.path for directory in directories],
        }
        paths = set(await connection.scalars(_LEFTOVER, parameters))
        return [directory for directory in directories if directory.path in paths]


def is_forward(policy: PolicyRow, n: int, parents: dict[int, int]) -> bool:
    """True if version `n` is on the head's path, and the active version is older or not on that path."""
    path = path_to_base(policy.head, parents)
    return n in path and (policy.active not in path or path.index(n) < path.index(policy.active))


async def _versions(connection: AsyncConnection, query: TextClause, **parameters: object) -> list[VersionRef]:
    return [version_ref(row) for row in await connection.execute(query, parameters)]


async def _removable(connection: AsyncConnection, age: timedelta) -> list[VersionRef]:
    versions = await _versions(connection, _REMOVABLE, age=age)
    kept = {policy: await _kept(connection, policy) for policy in {version.policy for version in versions}}
    return [version for version in versions if version.n not in kept[version.policy]]


async def _kept(connection: AsyncConnection, policy: str) -> set[int]:
    """The newest versions on the path to the head, and as many of those rejected that were made from it."""
    kept = (await connection.execute(_KEPT, {"policy": policy})).one()
    path = path_to_base(kept.head, await read_parents(connection, policy))[: kept.versions]
    # A person who sees a rejection the next morning can still release the version; of a later head it is no child.
    rejected = select(StepRow.n).where(
        StepRow.policy == policy, StepRow.parent == kept.head, StepRow.state == StepState.REJECTED
    )
    return {*path, *await connection.scalars(rejected.order_by(StepRow.n.desc()).limit(kept.versions))}
