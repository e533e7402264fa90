"""Finds content that is plain although the database is encrypted, and content that no key opens."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import ContentUnreadable, EncryptionKeyMissing
from db.content import PLAIN, content_of
from db.database import Database
from db.encryption.columns import SEALED_TABLES, TOOL_LISTS, Form, SealedTable, is_plain, is_sealed, sealed
from db.encryption.windows import Key, in_window, window_end

MAX_LISTED = 50


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
        if rows := await _count(database, table, where):
            plain[table.name] = rows
        if decrypt:
            unreadable += await _unreadable(database, table)
    return Audit(plain, unreadable[:MAX_LISTED])


async def _count(database: Database, table: SealedTable, where: str) -> int:
    rows, after = 0, None
    while True:
        here = after

        async def count(connection: AsyncConnection) -> tuple[int, Key | None]:
            end = await window_end(connection, table, here)  # noqa: B023
            inside, parameters = in_window(table, here, end)  # noqa: B023
            query = text(f"SELECT count(*) FROM {table.name} WHERE ({where}) AND {inside}")
            return await connection.scalar(query, parameters) or 0, end

        found, after = await database.run(count)
        rows += found
        if after is None:
            return rows


async def _unreadable(database: Database, table: SealedTable) -> list[str]:
    found: list[str] = []
    after: Key | None = None
    while len(found) < MAX_LISTED:
        here = after

        async def look(connection: AsyncConnection) -> Key | None:
            return await _look(connection, table, here, found)  # noqa: B023

        after = await database.run(look)
        if after is None:
            break
    return found


async def _look(connection: AsyncConnection, table: SealedTable, after: Key | None, found: list[str]) -> Key | None:
    """Decrypt a batch; the key of the last row that was looked at, None: that of the table."""
    where = " OR ".join(f"coalesce({is_sealed(name, form)}, false)" for name, form in table.columns.items())
    end = await window_end(connection, table, after)
    inside, parameters = in_window(table, after, end)
    query = text(f"""
        SELECT {table.selected()} FROM {table.name} WHERE ({where}) AND {inside}
        ORDER BY {", ".join(table.key)} LIMIT :limit
    """)
    rows = (await connection.execute(query, {**parameters, "limit": table.rows_at_once})).mappings().all()
    content = content_of(connection)
    for row in rows:
        for column, form in table.columns.items():
            try:
                sealed(content, PLAIN, row[column], form, f"{table.name}.{column}", table.place(dict(row)))
            except (ContentUnreadable, EncryptionKeyMissing) as error:
                found.append(str(error))
    return end if len(rows) < table.rows_at_once else tuple(rows[-1][name] for name in table.key)
