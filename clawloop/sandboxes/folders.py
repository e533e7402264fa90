"""Folders of sandboxes: each named and locked by the process that made it, so that those of a dead one are found.

The processes of a sandbox die with the worker that started it; only its folder can be left.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawloop.sandboxes.owned_folders import abandoned_folders, is_locked, owned_folder

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
        with owned_folder(self._root, f"{_PREFIX}{label}-") as folder:
            (folder / "box").mkdir()
            (folder / "task").mkdir()
            yield BoxFolder(folder)

    @property
    def owner(self) -> str:
        """Which folders these are, on which machine, and whose: workers of one user that see the same ones share it."""
        found = self._root.stat()
        return f"{socket.gethostname()}-{found.st_dev}-{found.st_ino}-{os.geteuid()}"

    def in_use(self, name: str) -> bool:
        """Whether the folder of this name is there, and its process alive or another user's."""
        return is_locked(self._root / name)

    def sweep(self) -> int:
        """Remove the folders whose process is dead; returns how many."""
        return sum(1 for _ in abandoned_folders(self._root, _PREFIX))
