"""Checks whether a database is encrypted, and whether this process has its keys."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, delete, func, select, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.core.encryption.key_file import SETTING
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, SetupError
from db.content import ContentCodec
from db.declarative import Base

# The row --------------------------------------------------------------------------------------------------------------
# The row that says that a database is encrypted.


class EncryptionRow(Base):
    """The content of this database is encrypted; one row or none. While it is there, PostgreSQL takes no plain text."""

    __tablename__ = "encryption"
    __table_args__ = (CheckConstraint("only_row", name="only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=true())
    check_value: Mapped[bytes]  # only the right keys open it
    since: Mapped[datetime] = mapped_column(server_default=func.now())


# Check ----------------------------------------------------------------------------------------------------------------
# Checks that this process has the keys of an encrypted database.

_PLACE = ("encryption.check_value", "the installation")
_KNOWN = b"clawloop"

_STORED = select(EncryptionRow.check_value)


async def require_keys(connection: AsyncConnection, content: ContentCodec) -> bool:
    """Compare the codec with the database. A database that is not encrypted is so from now on, if the codec has keys.

    Returns:
        False if the database has no tables yet, so that nothing could be compared.

    Raises:
        SetupError: the database is encrypted, and the codec has no keys or other keys.
    """
    if await connection.scalar(select(func.to_regclass("encryption"))) is None:
        return False
    stored = await connection.scalar(_STORED)
    if stored is None and content.is_on:
        begun = insert(EncryptionRow).values(check_value=check_value(content))
        await connection.execute(begun.on_conflict_do_nothing())
        stored = await connection.scalar(_STORED)
    if stored is not None:
        require_right_keys(stored, content)
    return True


def require_right_keys(stored: bytes, content: ContentCodec) -> None:
    """
    Raises:
        SetupError: the codec cannot read what these keys encrypt, or makes other digests.
    """
    if not content.is_on:
        raise SetupError(f"this database is encrypted: set {SETTING} to its key file")
    try:
        known = content.read_bytes(stored, *_PLACE)
    except (ContentUnreadable, EncryptionKeyMissing):
        raise SetupError(f"{SETTING}: the file lacks the key of this database") from None
    if known != content.write_digest(_KNOWN) + _KNOWN[:3]:
        raise SetupError(f"{SETTING}: the file's line `digests` differs from the one this database was encrypted with")


def check_value(content: ContentCodec) -> bytes:
    """A known value sealed with the codec's keys; it contains a digest, so it also tells the key file's `digests` line.

    33 bytes of a digest and three more: a length that plain bytes may have, so that a sealed value differs from them.
    """
    return content.write_bytes(content.write_digest(_KNOWN) + _KNOWN[:3], *_PLACE)


async def renew_check(connection: AsyncConnection, content: ContentCodec) -> None:
    """Encrypt the check value by the codec's first key."""
    await connection.execute(update(EncryptionRow).values(check_value=check_value(content)))


async def end_encryption(connection: AsyncConnection) -> None:
    """Let the database take plain content again."""
    await connection.execute(delete(EncryptionRow))
