"""Folders of sandboxes: what is in them, and how those of a dead process are found."""

from __future__ import annotations

import fcntl
import importlib.resources
import json
import os
import random
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from clawloop.core.errors import EpisodeUnusable, SetupError, TaskUnusable
from clawloop.sandboxes.boxes import GATEWAY_PORT, BoxTask, Limits

# Locked folders -------------------------------------------------------------------------------------------------------
# Folders that a process locks as long as it uses them, so that the folders of a dead process are found.
#
# The lock is the last file removed from a folder, so a process that is killed meanwhile leaves a folder that is found.

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


# Names ----------------------------------------------------------------------------------------------------------------
# Folders of sandboxes: each named and locked by the process that made it, so that those of a dead one are found.
#
# The processes of a sandbox die with the worker that started it; only its folder can be left.

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


# Contents -------------------------------------------------------------------------------------------------------------
# The folder of a sandbox: the program that runs first in it, its instructions, and the task's files.

WORK = "/work"
# Tells a command which folder is kept.
WORK_VARIABLE = "CLAWLOOP_WORK"
HOST_VARIABLES = {"PATH": "/usr/local/bin:/usr/bin", "HOME": WORK, "LANG": "C.UTF-8"}
# A folder in memory there would hide programs that the sandbox needs, or what it is given.
TAKEN = re.compile(
    r"/((usr|bin|sbin|lib|lib64|etc|proc|sys|dev|clawloop|task|tests|solution|artifact|logs|agent)(/.*)?|tmp)?"
    r"|/.*[,:].*|(.*/)?\.\.?(/.*)?|[^/].*"
)
# User ids that no host gives to people or services.
_FIRST_UID, _LAST_UID = 1_000_000_000, 2_000_000_000


def resource_limits(limits: Limits) -> dict[str, int]:
    """Limits of each process, by their names in `setrlimit`."""
    return {
        "RLIMIT_DATA" if limits.reserving else "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_FSIZE": limits.disk_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }


def working_folder(path: str | None, others: Collection[str]) -> str:
    """The folder whose files are kept, for commands that run at this path.

    Args:
        path: absolute, of `BoxTask.folder`.
        others: the working folder without it, by its names; the first is used without a path.

    Raises:
        TaskUnusable: no sandbox can have its working folder there.
    """
    if path is None:
        return next(iter(others))
    if TAKEN.fullmatch(path):
        raise TaskUnusable(f"the working folder cannot be {path}: a sandbox has other things there")
    return next((other for other in others if PurePosixPath(path).is_relative_to(other)), path)


def fill(
    folder: Path,
    task: BoxTask,
    limits: Mapping[str, int],
    work: str = WORK,
    environment: Mapping[str, str] | None = None,
    first_archive: bytes | None = None,
    memory_bytes: int = 0,
) -> None:
    """Write what the sandbox's first program reads, and the task's files.

    Args:
        limits: of `setrlimit`, by their names.
        work: the working folder, which is meant where the task says /work.
        environment: of the command, without the task's own variables.
        first_archive: unpacked in the working folder before the task's archive.
        memory_bytes: what all processes may have together; 0: something else bounds it.
    """
    box, files = folder / "box", folder / "task"
    config: dict[str, Any] = {
        "command": list(task.command),
        "seconds": task.seconds,
        "environment": {
            **({**HOST_VARIABLES, "HOME": work} if environment is None else environment),
            WORK_VARIABLE: work,
            **task.environment,
        },
        "port": 0 if task.gateway is None else GATEWAY_PORT,
        "work": work,
        "folder": task.folder or work,
        "archives": [],
        "output_bytes": task.limits.output_bytes,
        "artifact_bytes": task.limits.artifact_bytes,
        "memory_bytes": memory_bytes,
        "limits": dict(limits),
    }
    unpack_to = work if task.unpack_to == WORK else task.unpack_to
    archives = [(first_archive, work, None), (task.archive, unpack_to, None), (task.over, work, task.over_only)]
    for number, (archive, to, only) in enumerate(archives):
        if archive is not None:
            (box / f"{number}.tar").write_bytes(archive)
            config["archives"].append([f"{number}.tar", to, None if only is None else list(only)])
    (box / "config.json").write_text(json.dumps(config))
    (box / "inside.py").write_text((importlib.resources.files("clawloop.sandboxes") / "inside.py").read_text())
    for name, content in task.files.items():
        path = files / name
        if not path.resolve().is_relative_to(files.resolve()):
            raise EpisodeUnusable(f"a task's file must be below its folder, not {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if name in task.executable:
            path.chmod(0o755)


def give(folder: Path, uid: int | None) -> None:
    """Let the sandbox's user, and nobody else, read the folder."""
    if uid is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


def own_uid() -> int | None:
    """A user id of the sandbox's own; None if this process is not root, and all sandboxes have its user."""
    return random.randint(_FIRST_UID, _LAST_UID) if os.geteuid() == 0 else None
