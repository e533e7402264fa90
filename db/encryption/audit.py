"""Finds content that is plain although the database is encrypted, and content that no key opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import ContentUnreadable
from db.content import PLAIN, content_of
from db.database import Database
from db.encryption.columns import SEALED_TABLES, TOOL_LISTS, Form, SealedTable, is_plain, is_sealed, sealed

MAX_LISTED = 50
_BATCH_ROWS = 200


@dataclass(frozen=True, slots=True)
class Audit:
    """
    Args:
        plain: rows with plain content, by table; empty where the database is not encrypted.
        unreadable: places whose content cannot be decrypted, MAX_LISTED at most.
    """

    plain: dict[str, int]
    unreadable: list[str]


async def audit(database: Database, *, decrypt: bool) -> Audit:
    """
    Args:
        decrypt: decrypt all content; else only plain content is looked for.

    Raises:
        StoreUnavailable
    """
    if not database.content.is_on:
        return Audit({}, [])
    plain: dict[str, int] = {}
    unreadable: list[str] = []
    for table in (*SEALED_TABLES, TOOL_LISTS):
        columns = dict(table.columns)
        if table is TOOL_LISTS:
            columns["sha256"] = Form.DIGEST
        where = " OR ".join(f"coalesce({is_plain(name, form)}, false)" for name, form in columns.items())
        counting = text(f"SELECT count(*) FROM {table.name} WHERE {where}")

        async def count(connection: AsyncConnection) -> int:
            return await connection.scalar(counting) or 0  # noqa: B023

        if rows := await database.run(count):
            plain[table.name] = rows
        if decrypt:
            unreadable += await _unreadable(database, table)
    return Audit(plain, unreadable[:MAX_LISTED])


async def _unreadable(database: Database, table: SealedTable) -> list[str]:
    found: list[str] = []
    after: tuple[Any, ...] | None = None
    while len(found) < MAX_LISTED:
        here = after

        async def look(connection: AsyncConnection) -> tuple[Any, ...] | None:
            return await _look(connection, table, here, found)  # noqa: B023

        after = await database.run(look)
        if after is None:
            break
    return found


async def _look(
    connection: AsyncConnection, table: SealedTable, after: tuple[Any, ...] | None, found: list[str]
) -> tuple[Any, ...] | None:
    """Decrypt a batch; the key of its last row, None if it is empty."""
    where = " OR ".join(f"coalesce({is_sealed(name, form)}, false)" for name, form in table.columns.items())
    key = ", ".join(table.key)
    parameters: dict[str, Any] = {"limit": _BATCH_ROWS}
    if after is not None:
        where = f"({where}) AND ({key}) > ({', '.join(f':after_{n}' for n in range(len(after)))})"
        parameters |= {f"after_{n}": value for n, value in enumerate(after)}
    query = text(f"SELECT {table.selected()} FROM {table.name} WHERE {where} ORDER BY {key} LIMIT :limit")
    rows = (await connection.execute(query, parameters)).mappings().all()
    content = content_of(connection)
    for row in rows:
        for column, form in table.columns.items():
            try:
                sealed(content, PLAIN, row[column], form, f"{table.name}.{column}", table.place(dict(row)))
            except ContentUnreadable as error:
                found.append(str(error))
    return tuple(rows[-1][name] for name in table.key) if rows else None
