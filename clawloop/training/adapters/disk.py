"""Check that the disk has room for another version."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from clawloop.errors import ClawloopError, DiskFull, TrainerUnavailable

_MIB = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = "make room, or lower CLAWLOOP_MIN_FREE_DISK_GIB, then `clawloop training resume`"


def require_room(adapters: Path, version_bytes: int, kept_free: int) -> None:
    """
    Args:
        adapters: the folder of all versions.
        version_bytes: size of the version that will be written.
        kept_free: bytes that must be free afterwards.

    Raises:
        DiskFull: less space is free.
        TrainerUnavailable: the folder cannot be read.
    """
    try:
        adapters.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(adapters).free
    except OSError as error:
        raise TrainerUnavailable(f"{adapters} cannot be used: {error.strerror}") from error
    if free < version_bytes + kept_free:
        raise DiskFull(
            f"{free // _MIB} MiB are free in {adapters}, a version takes {version_bytes // _MIB} MiB and "
            f"{kept_free // _MIB} MiB are kept free for chats: {_REMEDY}"
        )


def write_error(version: int, error: OSError) -> ClawloopError:
    """The error to raise where a version could not be written."""
    what = f"version {version} cannot be written: {error.strerror}"
    return DiskFull(f"{what}: {_REMEDY}") if error.errno in _FULL else TrainerUnavailable(what)
