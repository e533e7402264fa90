"""Room on the disk that is kept for turns: a file without content, given up piece by piece when the disk is full."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

# About fifty turns of 32,000 tokens, or five thousand short ones.
RESERVE_BYTES = 16 * 2**20
# Beside a turn's content, its file and folder take a few blocks.
_BLOCKS = 16 * 1024


class DiskReserve:
    """Space kept free on the disk. The methods block on the disk: call them from a thread.

    Args:
        path: of the file; its folder exists.
        size_bytes: the largest size.
    """

    def __init__(self, path: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self._path = path
        self._size = size_bytes
        self._lock = threading.Lock()
        self.restore()

    @property
    def left_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def release(self, size_bytes: int) -> bool:
        """Give up room for a turn of this size; False if none is left."""
        with self._lock:
            left = self.left_bytes
            if left:
                os.truncate(self._path, max(0, left - size_bytes - _BLOCKS))
            return bool(left)

    def restore(self) -> None:
        """Take the room again, if as much stays free for others."""
        with self._lock, self._path.open("ab") as file:
            missing = self._size - self.left_bytes
            if missing > 0 and shutil.disk_usage(self._path).free >= 2 * missing:
                _allocate(file.fileno(), self._size - missing, missing)


def _allocate(descriptor: int, offset: int, length: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, length)
    except OSError:  # others were faster, or the file system cannot: without a reserve turns are held in memory sooner
        os.ftruncate(descriptor, offset)
