"""Publishing in PostgreSQL: which versions engines should have and have, which one answers, which files may go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import delete, func, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.algorithms.staleness import path_to_base
from clawloop.contracts.serving import Engine
from clawloop.contracts.training import AdapterDirectory, VersionRef
from clawloop.errors import RecordUnusable
from db.database import Database
from db.exact_json import storable
from db.serving.activation import is_served, set_active
from db.serving.engines import read_engines
from db.tables import EngineRow, EngineVersionRow, PolicyRow, VersionRow
from db.training.lineage import read_parents, version_ref
from db.training.policies import lock_policy

KEPT_ON_PATH = 3
"""So many newest versions of the path to the head keep their files: what a roll-back most likely wants."""

_WANTED = "v.n IN (p.head, p.active, p.pinned) AND v.n > 0 AND v.removed_at IS NULL"
_WANTED_VERSIONS = text(f"""
    SELECT v.* FROM versions v JOIN policies p ON p.id = v.policy WHERE {_WANTED} ORDER BY v.created_at, v.policy, v.n
""")
# One that was never active was passed over by a newer one; it may have been about to be activated.
_UNLOADABLE = text(f"""
    SELECT v.* FROM engine_versions e JOIN versions v ON v.policy = e.policy AND v.n = e.version
        JOIN policies p ON p.id = v.policy
    WHERE e.engine_id = :engine AND v.n > 0 AND NOT coalesce({_WANTED}, false)
        AND greatest(v.retired_at, e.loaded_at) <= now() - CAST(:age AS interval)
    ORDER BY v.created_at, v.policy, v.n
""")
# Samples that wait may need the version that answered them, to read their hint; so may turns still to be judged.
_REMOVABLE = text(f"""
    SELECT v.* FROM versions v JOIN policies p ON p.id = v.policy
    WHERE v.n > 0 AND v.removed_at IS NULL AND NOT coalesce({_WANTED}, false)
        AND v.created_at <= now() - CAST(:age AS interval)
        AND coalesce(v.retired_at <= now() - CAST(:age AS interval), true)
        AND NOT EXISTS (SELECT FROM engine_versions e WHERE e.policy = v.policy AND e.version = v.n)
        AND NOT EXISTS (SELECT FROM steps s WHERE s.policy = v.policy AND s.parent = v.n AND s.state = 'claimed')
        AND NOT EXISTS (
            SELECT FROM samples s JOIN turns t ON t.id = s.turn_id
            WHERE s.policy = v.policy AND s.state IN ('fresh', 'claimed') AND s.hinted_prompt_ids IS NOT NULL
                AND t.version = v.n)
        AND NOT EXISTS (
            SELECT FROM turns t JOIN sessions c ON c.id = t.session_id
            WHERE t.outcome = 'waiting' AND c.policy = v.policy AND t.version = v.n)
    ORDER BY v.policy, v.n
""")

_LEFTOVER = text("""
    SELECT d.path FROM unnest(CAST(:policies AS text[]), CAST(:ns AS int[]), CAST(:paths AS text[])) d (policy, n, path)
        JOIN steps s ON s.policy = d.policy AND s.n = d.n
    WHERE s.state <> 'claimed'
        AND NOT EXISTS (SELECT FROM versions v WHERE v.path = d.path AND v.policy = d.policy AND v.removed_at IS NULL)
""")


class PostgresPublishingStore:
    """Satisfies `activities.training.ports.PublishingStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def engines(self) -> list[Engine]:
        """
        Raises:
            StoreUnavailable
        """
        return await self._database.run(read_engines)

    async def wanted(self, engine_id: str) -> list[VersionRef]:
        """Versions this engine should have: of each policy head, active and pinned ones, oldest first.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_versions, _WANTED_VERSIONS))

    async def loaded(self, engine_id: str, policy: str, n: int) -> None:
        """
        Raises:
            StoreUnavailable
            RecordUnusable: there is no such engine or version.
        """
        row = {"engine_id": engine_id, "policy": policy, "version": n}
        await self._database.run(lambda connection: connection.execute(_HAS, row))

    async def unloaded(self, engine_id: str, policy: str, n: int) -> None:
        """
        Raises:
            StoreUnavailable
        """
        gone = delete(EngineVersionRow).where(
            EngineVersionRow.engine_id == engine_id, EngineVersionRow.policy == policy, EngineVersionRow.version == n
        )
        await self._database.run(lambda connection: connection.execute(gone))

    async def forget(self, engine_id: str) -> None:
        """It has lost all it had loaded: nothing is routed there but the base.

        Raises:
            StoreUnavailable
        """
        gone = delete(EngineVersionRow).where(EngineVersionRow.engine_id == engine_id)
        await self._database.run(lambda connection: connection.execute(gone))

    async def report(self, engine_id: str, problem: str | None) -> None:
        """Why the engine is out of rotation; None: it works.

        Raises:
            StoreUnavailable
        """
        row = update(EngineRow).where(EngineRow.id == engine_id)
        told = row.values(problem=None if problem is None else storable(problem))
        await self._database.run(lambda connection: connection.execute(told))

    async def activate(self, policy: str, n: int, epoch: int) -> bool:
        """Let version `n` answer from now on and tell gateways; False if that is not (any more) to be done.

        It is done forward only within an epoch, not while another is pinned, and only if an engine that takes
        requests has it. After a roll-back forward is on the path to the new head.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such policy.
        """
        return await self._database.run(partial(_activate, policy, n, epoch))

    async def unloadable(self, engine_id: str, age: timedelta) -> list[VersionRef]:
        """Loaded versions that are neither wanted nor were active, or freshly loaded, within `age`.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_versions, _UNLOADABLE, engine=engine_id, age=age))

    async def removable(self, age: timedelta) -> list[VersionRef]:
        """Versions whose files nobody needs: made and retired longer than `age` ago, on no engine, not wanted, not
        among the newest of the path, no step begins from them, and no sample or turn that waits was answered by them.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_removable, age))

    async def mark_removed(self, policy: str, n: int, age: timedelta) -> bool:
        """Note that a version's files are gone, unless it is not removable any more: then False.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such policy.
        """
        return await self._database.run(partial(_mark_removed, policy, n, age))

    async def leftover(self, directories: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
        """Those that no version has and none will have, because their step is over.

        A step's own row is what a late attempt would have to commit, so this needs no age.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_leftover, directories))


_HAS = insert(EngineVersionRow).on_conflict_do_nothing()


async def _versions(query: Any, connection: AsyncConnection, **values: object) -> list[VersionRef]:
    return [version_ref(row) for row in await connection.execute(query, values)]


async def _activate(policy: str, n: int, epoch: int, connection: AsyncConnection) -> bool:
    held = await lock_policy(connection, policy)
    if held.epoch != epoch or held.pinned not in (None, n):
        return False
    if held.active == n:
        return True
    parents = await read_parents(connection, policy)
    if n != 0 and n not in parents:
        raise RecordUnusable(f"policy {policy!r} has no version {n}")
    if held.pinned is None and not is_forward(held, n, parents):
        return False
    if not await is_served(connection, policy, n):
        return False
    await set_active(connection, held, n)
    return True


def is_forward(policy: PolicyRow, n: int, parents: dict[int, int]) -> bool:
    """On the path to the head, and beyond what is active unless that is on no such path any more."""
    path = path_to_base(policy.head, parents)
    return n in path and (policy.active not in path or path.index(n) < path.index(policy.active))


async def _removable(age: timedelta, connection: AsyncConnection) -> list[VersionRef]:
    found = await _versions(_REMOVABLE, connection, age=age)
    kept = {policy: await _kept(connection, policy) for policy in {version.policy for version in found}}
    return [version for version in found if version.n not in kept[version.policy]]


async def _mark_removed(policy: str, n: int, age: timedelta, connection: AsyncConnection) -> bool:
    # Roll-backs, pins and claims hold the policy too: they see that it is gone, or we see what they want.
    await lock_policy(connection, policy)
    if not any((version.policy, version.n) == (policy, n) for version in await _removable(age, connection)):
        return False
    gone = update(VersionRow).where(VersionRow.policy == policy, VersionRow.n == n)
    await connection.execute(gone.values(removed_at=func.now()))
    return True


async def _leftover(directories: Sequence[AdapterDirectory], connection: AsyncConnection) -> list[AdapterDirectory]:
    asked = {
        "policies": [one.policy for one in directories],
        "ns": [one.n for one in directories],
        "paths": [one.path for one in directories],
    }
    found = set(await connection.scalars(_LEFTOVER, asked))
    return [one for one in directories if one.path in found]


async def _kept(connection: AsyncConnection, policy: str) -> Collection[int]:
    held = (await connection.execute(text("SELECT head FROM policies WHERE id = :policy"), {"policy": policy})).one()
    path: Sequence[int] = path_to_base(held.head, await read_parents(connection, policy))
    return path[:KEPT_ON_PATH]
