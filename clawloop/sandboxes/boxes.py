"""A sandbox's task, limits and result, the same for bubblewrap and for containers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MIB = 1024 * 1024
GATEWAY_PORT = 8080
"""Port of the gateway inside a sandbox: `http://127.0.0.1:8080/v1`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a sandbox.

    Args:
        memory_bytes: address space of each process; or, with `reserving`, the memory that it can write to: browsers
            reserve far more than they use. Also what all processes may have in memory together.
        processes: processes and threads at a time.
        disk_bytes: of /work, /tmp, /logs and /artifact each, which are in memory.
        cpu_seconds: of each process.
        output_bytes: the end of the command's output that is kept.
        artifact_bytes: what may be left in /work; if it is more, nothing is kept.
        cpus: of a container; None: all. Sandboxes on the host's /usr have no such limit.
    """

    memory_bytes: int = 1024 * MIB
    processes: int = 64
    disk_bytes: int = 64 * MIB
    cpu_seconds: int = 600
    open_files: int = 256
    output_bytes: int = 64 * 1024
    artifact_bytes: int = 8 * MIB
    reserving: bool = False
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class BoxTask:
    """The command that a sandbox runs, with its files.

    Args:
        name: for people who list sandboxes.
        command: its first word is looked up in /usr/local/bin and /usr/bin.
        seconds: the command is stopped after this.
        files: read-only below /task.
        executable: which of the files can be run by their path.
        folders: of the host, read-only, by where they are in the sandbox; everybody must be able to read them.
        archive: a tar archive that is unpacked at `unpack_to` before.
        over: a tar archive that is unpacked in the working folder after that.
        over_only: files and folders, by their paths in the sandbox: nothing else of `over` is unpacked; None: all.
        gateway: host and port that the sandbox reaches at `GATEWAY_PORT`; None: it reaches nothing.
        image: of containers, whose files the sandbox has instead of the host's /usr, and whose working folder takes the
            place of /work; None: no image.
        fresh: without what the image has in its working folder.
        folder: absolute path in which the command runs. Below the working folder it is a part of that, else it takes
            its place, and /work and /app lead there; None: the working folder.
    """

    name: str
    command: Sequence[str]
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    archive: bytes | None = None
    unpack_to: str = "/work"
    environment: Mapping[str, str] = field(default_factory=dict)
    gateway: tuple[str, int] | None = None
    limits: Limits = Limits()
    image: str | None = None
    fresh: bool = False
    executable: Collection[str] = ()
    over: bytes | None = None
    over_only: Sequence[str] | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class BoxResult:
    """The result of a sandbox; none of it can be trusted.

    Args:
        exit_code: None if the command was stopped at its time limit.
        output: the end of its output.
        artifact: the files it left in /work, as a tar archive.
        problem: why there is no artifact, or why the command was ended before its time limit.
    """

    exit_code: int | None
    output: bytes
    artifact: bytes
    problem: str | None


class Sandboxes(Protocol):
    async def run(self, task: BoxTask) -> BoxResult:
        """Run a command in a new sandbox; nothing of it is left when this returns, or is cancelled.

        Raises:
            SandboxFailed: the sandbox itself did not work.
            EpisodeUnusable: the task needs what no sandbox here has.
        """
