"""What a worker of verifiers leaves on this machine when it is killed: working folders, and programs of agents.

A worker that ends by itself leaves none, as verifiers removes them. Each notes its rollouts in a locked folder, and
names the folder in a variable that its programs inherit; so the next worker finds what belongs to a dead one.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clawloop.sandboxes.owned_folders import abandoned_folders, owned_folder

VARIABLE = "CLAWLOOP_ROLLOUTS"
_PREFIX = "clawloop-rollouts-"
# Where the runtime `subprocess` of verifiers 0.4 has a folder for each rollout, by the id of its trace.
WORKING_FOLDERS = Path(".cache") / "verifiers" / "runtimes" / "subprocess"


class RolloutNotes:
    """The rollouts that this process runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    @contextmanager
    def open(cls, root: Path | None = None) -> Iterator[RolloutNotes]:
        """Notes in a new folder, locked until the end of the block, when it is removed; programs inherit its name.

        Args:
            root: an existing folder; None: the system's for temporary files.
        """
        with owned_folder(root or Path(tempfile.gettempdir()), _PREFIX) as folder:
            (folder / "rollouts").mkdir()
            os.environ[VARIABLE] = str(folder)
            try:
                yield cls(folder)
            finally:
                os.environ.pop(VARIABLE, None)

    def begun(self, trace: str) -> None:
        (self._folder / "rollouts" / trace).touch()

    def ended(self, trace: str) -> None:
        (self._folder / "rollouts" / trace).unlink(missing_ok=True)


def sweep_rollouts(root: Path | None = None, home: Path | None = None) -> int:
    """End programs of dead workers and remove their rollouts' folders; the number of workers."""
    swept = 0
    for folder in abandoned_folders(root or Path(tempfile.gettempdir()), _PREFIX):
        _end_programs(folder)
        for note in (folder / "rollouts").glob("*"):
            shutil.rmtree((home or Path.home()) / WORKING_FOLDERS / note.name, ignore_errors=True)
        swept += 1
    return swept


def _end_programs(folder: Path) -> None:
    """Kill what still runs with this folder's name in its environment."""
    named = f"{VARIABLE}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            if named in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
