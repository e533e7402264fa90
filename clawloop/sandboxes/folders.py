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

from clawloop.errors import SetupError
from clawloop.sandboxes.owned_folders import abandoned_folders, is_locked, owned_folder

_PREFIX = "clawloop-box-"
# An episode's id: each character more would be one less for the root.
_LABEL_CHARACTERS = 36
# Longest path of a Unix socket on Linux, without the terminating byte.
_SOCKET_BYTES = 107


@dataclass(frozen=True, slots=True)
class BoxFolder:
    path: Path

    @property
    def gateway(self) -> Path:
        """The socket by which the sandbox reaches the gateway."""
        return self.path / "box" / "gateway.sock"


class BoxFolders:
    """
    Args:
        root: an existing folder on a local disk, with a path that `check_path` takes; None: the system's for temporary
            files.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(tempfile.gettempdir())

    def check_path(self) -> None:
        """
        Raises:
            SetupError: the root's path is so long that sandboxes could not have a socket below it.
        """
        root = len(os.fsencode(self._root))
        with self.new("x" * _LABEL_CHARACTERS) as longest:
            limit = _SOCKET_BYTES + root - len(os.fsencode(longest.gateway))
        if root > limit:
            raise SetupError(
                f"sandboxes have sockets in the folder for temporary files, whose path may have {limit} characters, and"
                f" {self._root} has {root}: set TMPDIR to a shorter one"
            )

    @contextmanager
    def new(self, name: str) -> Iterator[BoxFolder]:
        """A folder with `box` and `task` for one sandbox; removed at the end of the block.

        Args:
            name: what people who list the folders see: letters, digits and dashes are kept.
        """
        label = re.sub(r"[^A-Za-z0-9-]+", "-", name)[:_LABEL_CHARACTERS]
        with owned_folder(self._root, f"{_PREFIX}{label}-") as folder:
            (folder / "box").mkdir()
            (folder / "task").mkdir()
            yield BoxFolder(folder)

    @property
    def owner(self) -> str:
        """Identity of the folders: machine, root folder and user. Workers of one user with the same root share it."""
        found = self._root.stat()
        return f"{socket.gethostname()}-{found.st_dev}-{found.st_ino}-{os.geteuid()}"

    def in_use(self, name: str) -> bool:
        """True if the folder of this name exists, and its process is alive or belongs to another user."""
        return is_locked(self._root / name)

    def sweep(self) -> int:
        """Remove the folders whose process is dead; returns how many."""
        return sum(1 for _ in abandoned_folders(self._root, _PREFIX))
