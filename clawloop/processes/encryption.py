"""Keeps a gateway without the right keys from storing anything, also while PostgreSQL is away.

PostgreSQL knows which keys encrypt it. A mark beside the spool says the same where PostgreSQL does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from clawloop.errors import SetupError, StoreUnavailable
from db.content import ContentCodec
from db.database import Database
from db.encryption.installation import check_value, require_right_keys

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


def write_mark(spool: Path, content: ContentCodec) -> None:
    """Note on this disk what PostgreSQL says of the keys."""
    mark = _mark(spool)
    if not content.is_on:
        mark.unlink(missing_ok=True)
        return
    if _is_written(mark, content):  # a gateway starts on a full disk, too
        return
    spool.mkdir(parents=True, exist_ok=True)
    partial = mark.with_suffix(f".{os.getpid()}")
    partial.write_bytes(check_value(content))
    partial.replace(mark)


def require_marked_keys(spool: Path, content: ContentCodec) -> None:
    """
    Raises:
        SetupError: turns in this folder are encrypted with other keys.
    """
    try:
        stored = _mark(spool).read_bytes()
    except FileNotFoundError:
        return
    require_right_keys(stored, content)


async def compare_keys(database: Database) -> None:
    """Compare the keys with PostgreSQL once it answers; end the process if they are others."""
    while True:
        try:
            await database.compare_keys()
            return
        except StoreUnavailable:
            await asyncio.sleep(_RETRY_SECONDS)
        except SetupError as error:
            log.critical("this gateway must not go on", extra={"why": str(error)})
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_written(mark: Path, content: ContentCodec) -> bool:
    try:
        stored = mark.read_bytes()
        require_right_keys(stored, content)
    except (FileNotFoundError, SetupError):
        return False
    return stored.startswith(content.head)


def _mark(spool: Path) -> Path:
    return spool / "encryption"
