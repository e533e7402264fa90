"""Opens the database of the settings, with the keys that encrypt its content."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

from clawloop.encryption.sealer import Sealer
from clawloop.errors import StoreUnavailable
from clawloop.processes.endpoints import database_url
from clawloop.settings import Settings
from db.content import PLAIN, ContentCodec
from db.database import BACKGROUND_LIMIT, Database
from db.schema import require_known_schema

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


def sealer_of(key_file: Path | None) -> Sealer | None:
    """
    Args:
        key_file: CLAWLOOP_ENCRYPTION_KEY_FILE; None: nothing is encrypted.

    Raises:
        SetupError: the file is unusable.
    """
    return None if key_file is None else Sealer(key_file)


def codec_of(key_file: Path | None) -> ContentCodec:
    """The database's codec, by a key file as for `sealer_of`; plain without one."""
    return PLAIN if key_file is None else ContentCodec(Sealer(key_file))


def require_database(settings: Settings) -> None:
    """Refuse wrong settings before anything is waited for.

    Raises:
        SetupError: as `open_database`.
    """
    database_url(settings)
    codec_of(settings.encryption_key_file)


def open_database(settings: Settings, limit: timedelta = BACKGROUND_LIMIT) -> Database:
    """
    Raises:
        SetupError: no database is configured, or the file of keys is unusable.
    """
    return Database(database_url(settings), limit, codec_of(settings.encryption_key_file))


async def ready_database(settings: Settings, stack: AsyncExitStack) -> Database:
    """The database of a worker, once it answers: a worker that cannot use it must take no work.

    Raises:
        SetupError: as `open_database`, or the database is encrypted with other keys, or another version's.
    """
    database = open_database(settings)
    stack.push_async_callback(database.close)
    logged = False
    while True:
        try:
            await database.compare_keys()
            await require_known_schema(database)
            return database
        except StoreUnavailable as error:
            if not logged:
                log.warning("PostgreSQL does not answer yet", extra={"why": str(error)})
                logged = True
            await asyncio.sleep(_RETRY_SECONDS)
