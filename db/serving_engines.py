"""vLLM servers as rows: which there are, and which of them take requests.

Knows nothing about whether they live. An engine's id is its host and port; it also names its task queue and stands
in every turn it answered, also after the engine was removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts import Engine
from clawloop.errors import SetupError
from db.engine import Database
from db.tables import Engine as EngineRow
from db.tables import EngineVersion


async def ensure_engines(database: Database, urls: Sequence[str]) -> list[Engine]:
    """Make exactly these the engines: missing ones are added, all others removed, known ones keep their state.

    Raises:
        SetupError: one is no http address.
        StoreUnavailable
    """
    rows = [_row(url) for url in urls]

    async def ensure(connection: AsyncConnection) -> list[Engine]:
        await connection.execute(delete(EngineRow).where(EngineRow.id.not_in([row["id"] for row in rows])))
        for row in rows:
            await _add(connection, row)
        return await read_engines(connection)

    return await database.run(ensure)


async def add_engine(database: Database, url: str) -> Engine:
    """Add one, or take a known one into rotation again.

    Raises:
        SetupError: it is no http address.
        StoreUnavailable
    """
    row = _row(url)

    async def add(connection: AsyncConnection) -> Engine:
        await _add(connection, row)
        await _set_draining(connection, row["id"], draining=False)
        return next(engine for engine in await read_engines(connection) if engine.id == row["id"])

    return await database.run(add)


async def list_engines(database: Database) -> list[Engine]:
    return await database.run(read_engines)


async def drain_engine(database: Database, engine_id: str, draining: bool = True) -> bool:
    """Give it no new requests, or let it take them again; False if there is no such engine."""
    return await database.run(partial(_set_draining, engine_id=engine_id, draining=draining))


async def remove_engine(database: Database, engine_id: str) -> bool:
    """Forget it and what it has loaded; False if there is no such engine."""

    async def remove(connection: AsyncConnection) -> bool:
        return (await connection.execute(delete(EngineRow).where(EngineRow.id == engine_id))).rowcount == 1

    return await database.run(remove)


async def read_engines(connection: AsyncConnection) -> list[Engine]:
    """All engines and what each has loaded, in the order of their ids."""
    loaded: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in await connection.execute(select(EngineVersion)):
        loaded[row.engine_id][row.policy].add(row.version)
    return [
        Engine(
            id=row.id,
            url=row.url,
            versions={policy: frozenset(versions) for policy, versions in loaded[row.id].items()},
            draining=row.draining,
        )
        for row in await connection.execute(select(EngineRow).order_by(EngineRow.id))
    ]


def _row(url: str) -> dict[str, str]:
    plain = url.strip().rstrip("/")
    try:
        parts = urlsplit(plain)
        port = parts.port
    except ValueError as error:
        raise SetupError(f"engine address {url!r} must look like http://host:port: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0 or "@" in parts.netloc:
        raise SetupError(f"engine address {url!r} must look like http://host:port")
    return {"id": f"{parts.netloc}{parts.path}", "url": plain}


async def _add(connection: AsyncConnection, row: dict[str, str]) -> None:
    new = insert(EngineRow).values(row)
    await connection.execute(new.on_conflict_do_update(index_elements=[EngineRow.id], set_={"url": new.excluded.url}))


async def _set_draining(connection: AsyncConnection, engine_id: str, draining: bool) -> bool:
    marked = await connection.execute(update(EngineRow).where(EngineRow.id == engine_id).values(draining=draining))
    return marked.rowcount == 1
