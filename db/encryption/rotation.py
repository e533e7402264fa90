"""Encrypts all stored content by the first key, or decrypts it, and finds content in the wrong form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, StoreContended
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

# Windows --------------------------------------------------------------------------------------------------------------
# Walks a table by its key in windows, so that no statement reads more content than its time allows.

Key: TypeAlias = tuple[Any, ...]

# A row of 5 kB takes 35 us to look at (measured, 20,000 rows in memory), one of 100 kB from a slow disk 1 ms; a
# statement has 27 s.
_WINDOW_ROWS = 5000


async def window_end(connection: AsyncConnection, table: SealedTable, after: Key | None) -> Key | None:
    """The key of the last row of the window after this key; None: the window reaches to the end of the table."""
    where, parameters = in_window(table, after, None)
    key = ", ".join(table.key)
    query = text(f"SELECT {key} FROM {table.name} WHERE {where} ORDER BY {key} OFFSET :skipped LIMIT 1")
    row = (await connection.execute(query, {**parameters, "skipped": _WINDOW_ROWS - 1})).one_or_none()
    return None if row is None else tuple(row)


def in_window(table: SealedTable, after: Key | None, end: Key | None) -> tuple[str, dict[str, Any]]:
    """SQL that says whether a row's key is above `after` and not above `end`, None being no bound; its parameters."""
    key, conditions, parameters = ", ".join(table.key), ["true"], dict[str, Any]()
    for name, sign, bound in (("after", ">", after), ("end", "<=", end)):
        if bound is None:
            continue
        conditions.append(f"({key}) {sign} ({', '.join(f':{name}_{n}' for n in range(len(bound)))})")
        parameters |= {f"{name}_{n}": value for n, value in enumerate(bound)}
    return " AND ".join(conditions), parameters


# Rotation -------------------------------------------------------------------------------------------------------------
# Encrypts all stored content by the first key, or decrypts it, in batches, while everything runs.
#
# A batch is one transaction. What is done is not done again, so an interrupted rotation is begun anew and goes on.

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


# Audit ----------------------------------------------------------------------------------------------------------------
# Finds content that is plain although the database is encrypted, and content that no key opens.

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
