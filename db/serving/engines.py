"""Stores which vLLM engines there are, and which of them take requests.

An engine's id is its host and port. It names the engine's task queue and is stored with every turn the engine answered,
even after the engine was removed.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import SetupError
from db.database import Database
from db.tables import EngineRow, EngineVersionRow

# Underscores are accepted because Compose puts them in service names.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


async def ensure_engines(database: Database, urls: Sequence[str], added_by: str) -> list[Engine]:
    """Make exactly these the engines of one installation; existing rows keep their state.

    Args:
        added_by: id of the installation, e.g. of its data folder; engines added by others stay.

    Returns:
        All engines.

    Raises:
        SetupError: a URL is not an http address.
        StoreUnavailable
    """
    rows = [_row(url) for url in urls]

    async def ensure(connection: AsyncConnection) -> list[Engine]:
        removed = EngineRow.id.not_in([row["id"] for row in rows])
        await connection.execute(delete(EngineRow).where(EngineRow.added_by == added_by, removed))
        for row in rows:
            await _add(connection, row, added_by)
        return await read_engines(connection)

    return await database.run(ensure)


async def add_missing_engines(database: Database, urls: Sequence[str], added_by: str | None) -> None:
    """Add the engines that are missing; existing rows keep their state, none is removed.

    Args:
        added_by: as in `ensure_engines`; None: a person, so no installation removes them.

    Raises:
        SetupError: a URL is not an http address.
        StoreUnavailable
    """
    rows = [_row(url) for url in urls]

    async def add(connection: AsyncConnection) -> None:
        for row in rows:
            await _add(connection, row, added_by)

    await database.run(add)


async def add_engine(database: Database, url: str) -> Engine:
    """Add an engine, or take an existing one back into rotation.

    Raises:
        SetupError: the URL is not an http address.
        StoreUnavailable
    """
    row = _row(url)

    async def add(connection: AsyncConnection) -> Engine:
        await _add(connection, row, None)
        await _set_draining(connection, row["id"], draining=False)
        return next(engine for engine in await read_engines(connection) if engine.id == row["id"])

    return await database.run(add)


async def list_engines(database: Database) -> list[Engine]:
    return await database.run(read_engines)


async def drain_engine(database: Database, engine_id: str, draining: bool = True) -> bool:
    """Stop new requests to an engine, or permit them again; False if there is no such engine."""
    return await database.run(partial(_set_draining, engine_id=engine_id, draining=draining))


async def remove_engine(database: Database, engine_id: str) -> bool:
    """Delete an engine and its loaded versions; False if there is no such engine."""

    async def remove(connection: AsyncConnection) -> bool:
        return (await connection.execute(delete(EngineRow).where(EngineRow.id == engine_id))).rowcount == 1

    return await database.run(remove)


async def read_engines(connection: AsyncConnection) -> list[Engine]:
    """All engines with their loaded versions, in the order of their ids."""
    loaded: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in await connection.execute(select(EngineVersionRow)):
        loaded[row.engine_id][row.policy].add(row.version)
    return [
        Engine(
            id=row.id,
            url=row.url,
            versions={policy: frozenset(versions) for policy, versions in loaded[row.id].items()},
            draining=row.draining,
            problem=row.problem,
        )
        for row in await connection.execute(select(EngineRow).order_by(EngineRow.id))
    ]


def engine_of(address: str) -> tuple[str, str]:
    """The id and URL of the engine at an address, which may be the id itself: `127.0.0.1:8100`.

    Raises:
        SetupError: the address is not an http address.
    """
    row = _row(address if "://" in address else f"http://{address}")
    return row["id"], row["url"]


def _row(url: str) -> dict[str, str]:
    address = url.strip().rstrip("/")
    if "@" in address:
        raise SetupError("an engine address must look like http://host:port, without user and password")
    try:
        parts = urlsplit(address)
        bracketed_name = "[" in parts.netloc and ":" not in (parts.hostname or "")
        valid = (
            parts.scheme in {"http", "https"}
            and parts.port != 0
            and not parts.query
            and not parts.fragment
            and not any(letter.isspace() for letter in address)
            and not bracketed_name
            and _is_host(parts.hostname or "")
        )
    except ValueError as error:
        raise SetupError(f"engine address {url!r} must look like http://host:port: {error}") from error
    if not valid:
        raise SetupError(f"engine address {url!r} must look like http://host:port")
    return {"id": f"{parts.netloc}{parts.path}", "url": address}


def _is_host(name: str) -> bool:
    """True if a name is a valid host name or IP address.

    Raises:
        ValueError: it is not.
    """
    if ":" in name:  # urlsplit has removed the brackets
        return ipaddress.ip_address(name.partition("%")[0]).version == 6
    labels = name.encode("idna").decode().removesuffix(".").split(".")  # also refuses empty and long labels
    if labels[-1].isdigit():
        return ipaddress.ip_address(name).version == 4
    return all(_LABEL.fullmatch(label) for label in labels)


async def _add(connection: AsyncConnection, row: dict[str, str], added_by: str | None) -> None:
    new = insert(EngineRow).values(row | {"added_by": added_by})
    await connection.execute(new.on_conflict_do_update(index_elements=[EngineRow.id], set_={"url": new.excluded.url}))


async def _set_draining(connection: AsyncConnection, engine_id: str, draining: bool) -> bool:
    updated = await connection.execute(update(EngineRow).where(EngineRow.id == engine_id).values(draining=draining))
    return updated.rowcount == 1
