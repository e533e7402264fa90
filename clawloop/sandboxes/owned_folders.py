"""Folders that a process locks as long as it uses them, so that the folders of a dead process are found.

The lock is the last file removed from a folder, so a process that is killed meanwhile leaves a folder that is found.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"
# A folder that is being made or removed has no lock for a moment; for longer, its process was killed at that moment.
_UNLOCKED_SECONDS = 600.0


@contextmanager
def owned_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A new folder, locked until the end of the block, when it is removed.

    Args:
        root: an existing folder on a local disk.
        prefix: begins its name.
    """
    folder, lock = _new_folder(root, prefix)
    try:
        try:
            yield folder
        finally:
            _remove(folder)
    finally:
        os.close(lock)


def abandoned_folders(root: Path, prefix: str) -> Iterator[Path]:
    """The folders whose process is dead, each locked while the caller has it, and removed afterwards.

    One that has been without a lock for minutes is removed only: what was to be done with it is done.
    """
    for folder in root.glob(f"{prefix}*"):
        try:
            unlocked = not (folder / _LOCK).exists()
            if unlocked and time.time() - folder.stat().st_mtime < _UNLOCKED_SECONDS:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | (os.O_CREAT if unlocked else 0), 0o600)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            if _is_lock_of(lock, folder):
                if not unlocked:
                    yield folder
                _remove(folder)
        finally:
            os.close(lock)


def is_locked(folder: Path) -> bool:
    """True if the process that made the folder lives, or belongs to another user, so that this cannot be checked."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def _new_folder(root: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and its lock; before it is locked, another process may remove it as a dead one's."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_lock_of(lock, folder):
            return folder, lock
        os.close(lock)


def _is_lock_of(lock: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), (folder / _LOCK).stat())
    except FileNotFoundError:
        return False


def _remove(folder: Path) -> None:
    """Remove a folder whose lock the caller has; what cannot be removed keeps the lock, too."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                with suppress(OSError):
                    path.unlink()
        if [path.name for path in folder.iterdir()] == [_LOCK]:
            (folder / _LOCK).unlink()
            folder.rmdir()
