"""Files of messages in PostgreSQL: each is stored once, with the first turn that has it, and goes with the last one.

Beside the turns, not in a folder: a turn and its files are written, and erased, in one transaction, so that no turn
lacks a file and no file is left over, whenever a process is killed; and gateways and workers of several machines all
have them.

A turn refers to the files of the messages that it adds to its parent's. Who has the turn has the parent, too: an
erasure takes no parent without its children.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Uuid, any_, cast, delete, literal, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.ids import SessionId, TurnId, new_file_id
from clawloop.core.turns.files import ContentFile
from db.content import ContentCodec, content_of
from db.database import PostgresStore, Raw, transaction
from db.tables import FileRow, TurnFileRow, TurnRow

# Sealed bytes are told from plain ones by their length, which for plain ones is a multiple of 4.
_PADDED = 4
_COLUMN = "files.content"
# Keeps an erasure from deleting them; sorted, as the erasure locks them.
_LOCK_FILES = "SELECT digest, id FROM files WHERE digest = ANY(%b::bytea[]) ORDER BY digest FOR KEY SHARE"
_INSERT_FILE = "INSERT INTO files (id, digest, size_bytes, content) VALUES (%b, %b, %b, %b) ON CONFLICT DO NOTHING"
_INSERT_REFERENCES = """
    INSERT INTO turn_files (turn_id, file_id)
    SELECT * FROM unnest(%b::uuid[], %b::uuid[]) ON CONFLICT DO NOTHING
"""
_REFERENCE = select(TurnFileRow.turn_id).where(TurnFileRow.file_id == FileRow.id).correlate(FileRow)


class PostgresFileStore(PostgresStore):
    """Implements `api.stores.FileReader`; also reads pictures for a judge."""

    async def read(self, sha256: str) -> bytes | None:
        return (await self._read(true(), [sha256])).get(sha256)

    async def of_session(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        return await self._read(_is_of_session(literal(session)), sha256s)

    async def of_turn(self, turn: TurnId, sha256s: Collection[str]) -> dict[str, bytes]:
        """Contents of these files, as far as the turn's session has them."""
        session = select(TurnRow.session_id).where(TurnRow.id == turn).scalar_subquery()
        return await self._read(_is_of_session(session), sha256s)

    @transaction
    async def _read(
        self, connection: AsyncConnection, condition: ColumnElement[bool], sha256s: Collection[str]
    ) -> dict[str, bytes]:
        if not sha256s:
            return {}
        content = content_of(connection)
        digests = content.find_digests(bytes.fromhex(sha256) for sha256 in sha256s)
        found = select(FileRow.__table__).where(FileRow.digest.in_(digests), condition)
        return {
            digests[row.digest].hex(): content.read_bytes(row.content, _COLUMN, row.id)[: row.size_bytes]
            for row in await connection.execute(found)
        }


def _is_of_session(session: ColumnElement[Any]) -> ColumnElement[bool]:
    """Condition that the file belongs to a turn of the session: a client may write any reference into a message."""
    reference = _REFERENCE.join(TurnRow, TurnRow.id == TurnFileRow.turn_id)
    return reference.where(TurnRow.session_id == session).exists()


async def insert_files(raw: Raw, files: Collection[ContentFile], content: ContentCodec) -> Mapping[str, Any]:
    """Insert the files that are missing, and lock all until the end of the transaction; their ids by SHA-256."""
    by_hash = {file.sha256: file for file in files}
    digests = content.find_digests(bytes.fromhex(sha256) for sha256 in by_hash)
    ids: dict[str, Any] = {}
    while len(ids) < len(by_hash):  # once more where an erasure has just deleted one
        rows = await raw.execute(_LOCK_FILES, [sorted(digests)])
        ids = {digests[digest].hex(): file_id for digest, file_id in await rows.fetchall()}
        # In one order for all transactions: each waits for a file that another transaction is inserting.
        missing = sorted((_row(file, content) for file in by_hash.values() if file.sha256 not in ids), key=_digest)
        if missing:
            await raw.cursor().executemany(_INSERT_FILE, missing)
    return ids


async def insert_references(raw: Raw, references: Sequence[tuple[TurnId, Any]]) -> None:
    """
    Args:
        references: turns that were inserted in this transaction, each with the id of a file that it refers to.
    """
    if references:
        await raw.execute(_INSERT_REFERENCES, [list(column) for column in zip(*references, strict=True)])


async def release_files(connection: AsyncConnection, turns: Collection[TurnId]) -> None:
    """Remove what these turns refer to, and the files to which no other turn refers."""
    if not turns:
        return
    dropped = (
        delete(TurnFileRow)
        .where(TurnFileRow.turn_id == any_(cast(list(turns), ARRAY(Uuid))))
        .returning(TurnFileRow.file_id)
    )
    if files := list(await connection.scalars(dropped)):
        # Two statements: the lock waits for a transaction that inserts a turn with the file, the delete then sees that
        # turn.
        of_these = FileRow.id == any_(cast(files, ARRAY(Uuid)))
        await connection.execute(select(FileRow.id).where(of_these).order_by(FileRow.digest).with_for_update())
        await connection.execute(delete(FileRow).where(of_these, ~_REFERENCE.exists()))


def _digest(row: tuple[Any, ...]) -> bytes:
    digest: bytes = row[1]
    return digest


def _row(file: ContentFile, content: ContentCodec) -> tuple[Any, ...]:
    file_id, size = new_file_id(), len(file.content)
    padded = file.content + bytes(-size % _PADDED)
    digest = content.write_digest(bytes.fromhex(file.sha256))
    return file_id, digest, size, content.write_bytes(padded, _COLUMN, file_id)
