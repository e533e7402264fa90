"""The folder of a sandbox: the program that runs first in it, its instructions, and the task's files."""

from __future__ import annotations

import importlib.resources
import json
import os
import random
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from clawloop.errors import EpisodeUnusable, TaskUnusable
from clawloop.sandboxes.boxes import GATEWAY_PORT, BoxTask, Limits

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
