"""Opens the database of the settings, with the keys that encrypt its content."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path

from api.recording.spool import rejected_turns, reseal_turn, waiting_turns
from clawloop.app.processes.endpoints import database_url
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import EncryptionKeyMissing, RecordUnusable, SetupError, StoreUnavailable
from clawloop.core.settings import Settings
from clawloop.environments.artifacts import ArtifactFolder
from db.content import PLAIN, ContentCodec
from db.database import BACKGROUND_LIMIT, Database
from db.encryption.installation import check_value, require_right_keys
from db.encryption.rotation import rotate
from db.schema import require_known_schema

# Opening --------------------------------------------------------------------------------------------------------------
# Opens the database of the settings, with the keys that encrypt its content.

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


# A gateway's keys -----------------------------------------------------------------------------------------------------
# Keeps a gateway without the right keys from storing anything, also while PostgreSQL is away.
#
# PostgreSQL knows which keys encrypt it. A mark beside the spool says the same where PostgreSQL does not answer.

_KEYS_RETRY_SECONDS = 1.0


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
            await asyncio.sleep(_KEYS_RETRY_SECONDS)
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


# Encrypting anew ------------------------------------------------------------------------------------------------------
# Encrypts stored content by the file's first key: the database's, and the data folder's.


@dataclass(frozen=True, slots=True)
class Reencrypted:
    """
    Args:
        rows: changed, by table.
        files: changed in the data folder.
        unreadable: places that no key opens; they stay as they are.
    """

    rows: dict[str, int]
    files: int
    unreadable: list[str]


async def reencrypt(settings: Settings, *, decrypt: bool, told: Callable[[str, int], None]) -> Reencrypted:
    """
    Args:
        decrypt: store all as plain content; everything else must be stopped.
        told: as for `rotate`.

    Raises:
        SetupError, StoreUnavailable
    """
    assert settings.encryption_key_file is not None
    sealer = Sealer(settings.encryption_key_file)
    database = open_database(settings)
    try:
        done = await rotate(database, decrypt=decrypt, told=told)
    finally:
        await database.close()
    files, unreadable = await asyncio.to_thread(_reseal_files, settings.data, sealer, decrypt)
    return Reencrypted(done.rows, files, [*done.unreadable, *unreadable])


def _reseal_files(data: Path, sealer: Sealer, decrypt: bool) -> tuple[int, list[str]]:
    changed, unreadable = 0, []
    for reseal in _resealing(data, sealer, decrypt):
        try:
            changed += reseal()
        except (RecordUnusable, EncryptionKeyMissing) as error:
            unreadable.append(str(error))
        except FileNotFoundError:  # pruned or removed meanwhile
            continue
    return changed, unreadable


def _resealing(data: Path, sealer: Sealer, decrypt: bool) -> Iterator[Callable[[], bool]]:
    """One function for each file, which re-encrypts it and returns True if it changed."""
    spool = data / "spool"
    for path in chain(rejected_turns(spool), waiting_turns(spool)):
        yield lambda path=path: reseal_turn(path, sealer, decrypt=decrypt)  # type: ignore[misc]
    if not decrypt:  # a keyed digest is of an encrypted artifact for ever
        folder = ArtifactFolder(data / "artifacts", sealer)
        for digest in folder.digests():
            yield lambda digest=digest: folder.reseal(digest)  # type: ignore[misc]
