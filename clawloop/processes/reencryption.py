"""Encrypts stored content by the file's first key: the database's, and the data folder's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from api.recording.spool import rejected_turns, reseal_turn, waiting_turns
from clawloop.encryption.sealer import Sealer
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.errors import EncryptionKeyMissing, RecordUnusable
from clawloop.processes.database import open_database
from clawloop.settings import Settings
from db.encryption.rotation import rotate


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
