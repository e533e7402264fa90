"""Encrypts all stored content by the first key, or decrypts it, in batches, while everything runs.

A batch is one transaction. What is done is not done again, so an interrupted rotation is begun anew and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import ContentUnreadable, EncryptionKeyMissing, StoreContended
from db.content import PLAIN, ContentCodec, content_of
from db.database import Database
from db.encryption.columns import (
    SEALED_TABLES,
    TOOL_LISTS,
    Form,
    SealedTable,
    is_plain,
    is_sealed,
    is_sealed_by_another,
    sealed,
)
from db.encryption.installation import end_encryption, renew_check
from db.encryption.windows import Key, in_window, window_end

# A turn may hold tens of MB, and a batch has 30 s.
_BATCH_ROWS = 50
_BATCH_REFERENCES = 1000
# Other transactions lock single rows, in an order of their own.
_ATTEMPTS = 20
# Lets plain content into an encrypted database.
_DECRYPTING = text("SELECT set_config('clawloop.decrypting', 'on', true)")

_OLD_LISTS = text(f"""
    SELECT sha256, tools::text AS tools FROM tool_lists WHERE {is_plain("sha256", Form.DIGEST)} ORDER BY sha256 LIMIT 1
""")
_NEW_LIST = text("""
    INSERT INTO tool_lists (sha256, tools) VALUES (:sha256, CAST(:tools AS json)) ON CONFLICT DO NOTHING
""")
_MOVE_TURNS = text("""
    UPDATE turns SET tools_sha256 = :new WHERE id IN (
        SELECT id FROM turns WHERE tools_sha256 = :old ORDER BY id LIMIT :limit FOR NO KEY UPDATE)
""")
_DROP_LIST = text("""
    DELETE FROM tool_lists l WHERE sha256 = :old AND NOT EXISTS (SELECT FROM turns t WHERE t.tools_sha256 = l.sha256)
""")


# An engine's error may quote what it was asked, and reasons are stored as they are.
_SHORTEN_REASONS = f"""
    UPDATE turns SET outcome_detail = 'no reply: ' || status
    WHERE outcome_detail = 'no reply: ' || error AND {is_plain("error", Form.TEXT)} AND
"""
_TURNS = next(table for table in SEALED_TABLES if table.name == "turns")


# Files are found by their digest, and without keys no process can compute a keyed digest.
_NAME_PLAIN_FILES = text(f"""
    UPDATE files f SET digest = named.digest
    FROM (
        SELECT id, sha256(substr(content, 1, size_bytes)) AS digest FROM files
        WHERE {is_plain("content", Form.BYTES)} AND NOT {is_plain("digest", Form.DIGEST)}
            AND NOT EXISTS (SELECT FROM files o WHERE o.digest = sha256(substr(files.content, 1, files.size_bytes)))
        LIMIT {_BATCH_ROWS}
    ) named
    WHERE f.id = named.id
""")


@dataclass(slots=True)
class Rotated:
    """
    Args:
        rows: changed, by table.
        unreadable: places that no key opens; they stay as they are.
    """

    rows: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


async def rotate(
    database: Database, *, decrypt: bool = False, told: Callable[[str, int], None] = lambda table, rows: None
) -> Rotated:
    """
    Args:
        database: with the keys.
        decrypt: store everything as plain content, and say that the database is not encrypted any more.
        told: gets each table's name and how many of its rows are done, after each batch.

    Raises:
        StoreUnavailable
    """
    done = Rotated()
    if not decrypt:
        await _shorten_reasons(database)
        await _rotate_tool_lists(database, done)
    for table in (*SEALED_TABLES, TOOL_LISTS):
        await _rotate_table(database, table, decrypt, done, told)
    if decrypt:
        while await _patiently(database, _name_plain_files):
            pass
        if not done.unreadable:
            await database.run(end_encryption)
    else:
        await database.run(lambda connection: renew_check(connection, database.content))
    return done


async def _rotate_table(
    database: Database, table: SealedTable, decrypt: bool, done: Rotated, told: Callable[[str, int], None]
) -> None:
    condition = " OR ".join(_due(column, form, database.content, decrypt) for column, form in table.columns.items())
    after: Key | None = None
    while True:
        batch = await _patiently(database, lambda connection: _batch(connection, table, condition, after, decrypt))  # noqa: B023
        done.unreadable += batch.unreadable
        done.rows[table.name] = done.rows.get(table.name, 0) + batch.changed
        if batch.changed:
            told(table.name, done.rows[table.name])
        if batch.last is None:
            return
        after = batch.last


@dataclass(frozen=True, slots=True)
class _Batch:
    """
    Args:
        last: key of the last row that was looked at; None: that of the table.
    """

    changed: int
    unreadable: Sequence[str]
    last: Key | None


async def _batch(
    connection: AsyncConnection, table: SealedTable, condition: str, after: Key | None, decrypt: bool
) -> _Batch:
    content = content_of(connection)
    target = PLAIN if decrypt else content
    if decrypt:
        await connection.execute(_DECRYPTING)
    end = await window_end(connection, table, after)
    where, parameters = in_window(table, after, end)
    query = text(f"""
        SELECT {table.selected()} FROM {table.name} WHERE ({condition}) AND {where}
        ORDER BY {", ".join(table.key)} LIMIT :limit FOR NO KEY UPDATE
    """)
    most = min(_BATCH_ROWS, table.rows_at_once)
    rows = (await connection.execute(query, {**parameters, "limit": most})).mappings().all()
    unreadable: list[str] = []
    changed: list[dict[str, Any]] = []
    for row in rows:
        try:
            changed.append(_changed(table, dict(row), content, target))
        except (ContentUnreadable, EncryptionKeyMissing) as error:
            unreadable.append(str(error))
    if changed:
        await connection.execute(_update(table), changed)
    last = end if len(rows) < most else tuple(rows[-1][name] for name in table.key)
    return _Batch(len(changed), unreadable, last)


def _changed(table: SealedTable, row: Mapping[str, Any], content: ContentCodec, target: ContentCodec) -> dict[str, Any]:
    """The parameters of `_update`."""
    place = table.place(row)
    values: dict[str, Any] = {f"key_{n}": row[name] for n, name in enumerate(table.key)}
    for column, form in table.columns.items():
        values[f"new_{column}"] = sealed(content, target, row[column], form, f"{table.name}.{column}", place)
    return values


def _update(table: SealedTable) -> TextClause:
    assigned = ", ".join(
        f"{column} = CAST(:new_{column} AS json)" if form is Form.JSON else f"{column} = :new_{column}"
        for column, form in table.columns.items()
    )
    key = " AND ".join(f"{name} = :key_{n}" for n, name in enumerate(table.key))
    return text(f"UPDATE {table.name} SET {assigned} WHERE {key}")


def _due(column: str, form: Form, content: ContentCodec, decrypt: bool) -> str:
    if decrypt:
        return f"coalesce({is_sealed(column, form)}, false)"
    another = is_sealed_by_another(column, form, content.head)
    return f"coalesce({is_plain(column, form)}, false) OR coalesce({another}, false)"


async def _shorten_reasons(database: Database) -> None:
    after: Key | None = None

    async def shorten(connection: AsyncConnection) -> Key | None:
        end = await window_end(connection, _TURNS, after)
        where, parameters = in_window(_TURNS, after, end)
        await connection.execute(text(f"{_SHORTEN_REASONS} {where}"), parameters)
        return end

    while (after := await _patiently(database, shorten)) is not None:
        pass


async def _name_plain_files(connection: AsyncConnection) -> int:
    """Give decrypted files the digests by which they are found without keys; how many of them."""
    await connection.execute(_DECRYPTING)
    return (await connection.execute(_NAME_PLAIN_FILES)).rowcount


async def _rotate_tool_lists(database: Database, done: Rotated) -> None:
    """Give each list a keyed digest as its key, and let its turns refer to that."""
    while True:

        async def begin(connection: AsyncConnection) -> tuple[bytes, bytes] | None:
            row = (await connection.execute(_OLD_LISTS)).one_or_none()
            if row is None:
                return None
            content = content_of(connection)
            tools = content.json_text(row.tools, "tool_lists.tools", row.sha256.hex())
            new = content.write_digest(row.sha256)
            stored = content.write_json(tools, "tool_lists.tools", new.hex())
            await connection.execute(_NEW_LIST, {"sha256": new, "tools": stored})
            return row.sha256, new

        keys = await _patiently(database, begin)
        if keys is None:
            return
        moving = {"old": keys[0], "new": keys[1], "limit": _BATCH_REFERENCES}

        async def move(connection: AsyncConnection) -> int:
            return (await connection.execute(_MOVE_TURNS, moving)).rowcount  # noqa: B023

        while await _patiently(database, move):
            pass

        async def drop(connection: AsyncConnection) -> None:
            await connection.execute(_DROP_LIST, {"old": moving["old"]})  # noqa: B023

        await _patiently(database, drop)
        done.rows["tool_lists"] = done.rows.get("tool_lists", 0) + 1


async def _patiently(database: Database, work: Any) -> Any:
    """Run the work as `Database.run` does, again if another transaction won a deadlock."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return await database.run(work)
        except StoreContended:
            continue
    return await database.run(work)
