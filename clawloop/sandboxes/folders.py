"""Folders of sandboxes: each named and locked by the process that made it, so that those of a dead one are found.

The processes of a sandbox die with the worker that started it; only its folder can be left.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "clawloop-box-"


@dataclass(frozen=True, slots=True)
class BoxFolder:
    path: Path


class BoxFolders:
    """
    Args:
        root: an existing folder on a local disk with a short path, since Unix sockets have at most 107 characters.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(tempfile.gettempdir())

    @contextmanager
    def new(self, name: str) -> Iterator[BoxFolder]:
        """A folder with `box` and `task` for one sandbox; removed at the end of the block.

        Args:
            name: what people who list the folders see: letters, digits and dashes are kept.
        """
        label = re.sub(r"[^A-Za-z0-9-]+", "-", name)[:40]
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{label}-", dir=self._root))
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "box").mkdir()
            (folder / "task").mkdir()
            yield BoxFolder(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def sweep(self) -> int:
        """Remove the folders whose process is dead; returns how many."""
        removed = 0
        for folder in self._root.glob(f"{_PREFIX}*"):
            try:
                lock = os.open(folder / "lock", os.O_RDWR)
            except OSError:  # being made, being removed, or another user's
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
            finally:
                os.close(lock)
        return removed
