"""Permissions of a data folder: conversations, keys and Temporal's history are for its owner alone.

PostgreSQL runs as another user where Clawloop runs as root; it opens its folder through its working directory, which
needs no permission on the folders above.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

UMASK = 0o077
"""Set by every command: what Clawloop creates is readable by its user alone."""

# Folders with conversations. Adapters and models stay readable, for engines that mount their folders as another user.
_PRIVATE = ("logs", "spool", "temporal")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_private(data: Path) -> int:
    """Take a data folder's permissions from everyone but its owner.

    A folder that was copied or restored may be open to every user of the machine. A folder of another owner is left as
    it is: its permissions are that owner's decision.

    Returns:
        how many files and folders another user could open.
    """
    tightened = _tighten(data)
    for name in _PRIVATE:
        for folder, _, files in os.walk(data / name):
            tightened += _tighten(Path(folder)) + sum(_tighten(Path(folder) / file) for file in files)
    return tightened


def _tighten(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:  # a spooled turn that a gateway has just stored
        return 0
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or not status.st_mode & _OTHERS:
        return 0
    path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    return 1
