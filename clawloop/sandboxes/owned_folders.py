"""Folders that a process locks as long as it uses them, so that those of a dead one are found."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def owned_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A new folder, locked until the end of the block, when it is removed.

    Args:
        root: an existing folder on a local disk.
        prefix: begins its name.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def abandoned_folders(root: Path, prefix: str) -> Iterator[Path]:
    """The folders whose process is dead, each locked while the caller has it, and removed afterwards."""
    for folder in root.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:  # being made, being removed, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            yield folder
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def is_locked(folder: Path) -> bool:
    """Whether the process that made the folder lives, or is another user's, who alone can know."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
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
