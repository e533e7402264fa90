"""Sandboxes by podman or docker, for tasks that name an image: its files, read-only, instead of the host's /usr.

A container has no network, capability or writable place but folders in memory: the image's working folder, /tmp, /logs
and /artifact. Its name is that of its folder, and labels say whose it is, so that those of dead workers are found.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clawloop.errors import SandboxFailed
from clawloop.sandboxes.answers import parse_answer, read_up_to
from clawloop.sandboxes.boxes import BoxResult, BoxTask
from clawloop.sandboxes.container_engine import ContainerEngine
from clawloop.sandboxes.contents import fill, give, own_uid, resource_limits
from clawloop.sandboxes.folders import BoxFolders
from clawloop.sandboxes.images import Image, Images
from clawloop.sandboxes.relay import relaying

log = logging.getLogger(__name__)

OWNER_LABEL = "clawloop.owner"
EPISODE_LABEL = "clawloop.episode"
# Above every limit inside: for making and removing the container, packing and sending what was left.
_GRACE_SECONDS = 60.0
_REMOVE_SECONDS = 30.0
# Exit codes of podman and docker if no container was started, or its program was not found.
_NOT_STARTED = (125, 126, 127)
# Their exit code if the container's first process was killed. No signal from inside reaches that process; and at the
# container's memory limit the kernel kills the largest process, not this one, which only waits for its child.
_KILLED = 128 + signal.SIGKILL
# Folder to which the files of an image's working folder are copied, once for each image.
_COPY_AT = "/clawloop-copy"
_COPY = 'if [ -d "$0" ]; then cp -R "$0/." .; fi'
_COPY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class _Made:
    """A container's image as it is used, its working folder there, and what lies in that at first."""

    image: Image
    work: str
    first: bytes | None


class Containers:
    """Satisfies `clawloop.sandboxes.boxes.Sandboxes`, for tasks with an image.

    Args:
        folders: where containers have their sockets and tasks.
    """

    def __init__(self, engine: ContainerEngine, folders: BoxFolders) -> None:
        self._engine = engine
        self._folders = folders
        self._images = Images(engine, self._content)

    @classmethod
    def find(cls, folders: BoxFolders) -> Containers:
        """
        Raises:
            SetupError: neither podman nor docker answers here.
        """
        return cls(ContainerEngine.find(), folders)

    async def run(self, task: BoxTask) -> BoxResult:
        """Run a command in a new container; nothing of it is left when this returns, or is cancelled.

        Raises:
            SandboxFailed: the container itself did not work.
            EpisodeUnusable: there is no such image, it cannot be pulled, or it lacks what a sandbox needs.
        """
        assert task.image is not None
        image = await self._images.ready(task.image, task.folder)
        try:
            return await self._run(task, _Made(image, image.work, None if task.fresh else image.files))
        except SandboxFailed:
            await self._images.forget_if_gone(image)
            raise

    async def _content(self, image: Image) -> BoxResult:
        """The files of an image's working folder, as far as what a sandbox leaves may be large."""
        task = BoxTask("image", ("sh", "-c", _COPY, image.work), _COPY_SECONDS, image=image.name)
        return await self._run(task, _Made(image, _COPY_AT, None))

    async def _run(self, task: BoxTask, made: _Made) -> BoxResult:
        async with AsyncExitStack() as stack:
            box = stack.enter_context(self._folders.new(task.name))
            uid = own_uid()
            # By RLIMIT_DATA, since an image's programs may reserve more than they use; the container has a limit too.
            limits = resource_limits(replace(task.limits, reserving=True))
            if uid is None:
                del limits["RLIMIT_NPROC"]  # it would count other processes of this user
            variables = {**made.image.variables, "HOME": made.work, "LANG": "C.UTF-8"}
            await asyncio.to_thread(fill, box.path, task, limits, made.work, variables, made.first)
            if task.gateway is not None:
                await stack.enter_async_context(relaying(box.gateway, *task.gateway))
            give(box.path, uid)
            command = [str(self._engine.program), *self._arguments(box.path, task, made, uid)]
            return await self._answer(command, box.path.name, task)

    def _arguments(self, folder: Path, task: BoxTask, made: _Made, uid: int | None) -> list[str]:
        limits = task.limits
        in_memory = (made.work, "/tmp", "/logs", "/artifact", *made.image.volumes)
        memory = str(limits.memory_bytes + len(in_memory) * limits.disk_bytes)
        read = {"/clawloop": folder / "box", **dict.fromkeys(("/task", "/tests", "/solution"), folder / "task")}
        user = self._engine.user(uid)
        tmpfs = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},mode=1777,{self._engine.tmpfs_options(user)}"
        return [
            *("run", "--rm", "--interactive", "--pull=never", "--name", folder.name),
            *("--label", f"{OWNER_LABEL}={self._folders.owner}", "--label", f"{EPISODE_LABEL}={task.name}"),
            *("--network=none", "--read-only", "--cap-drop=ALL"),
            *("--security-opt=no-new-privileges", "--security-opt=label=disable"),
            *(f"--pids-limit={limits.processes}", f"--memory={memory}", f"--memory-swap={memory}"),
            *([] if limits.cpus is None else [f"--cpus={limits.cpus:g}"]),
            *("--shm-size=1m", f"--ulimit=nofile={limits.open_files}:{limits.open_files}", "--ulimit=core=0:0"),
            # The command's output is in no log. With the default signal, waiting programs take ten seconds to stop.
            *("--log-driver=none", "--stop-signal=SIGKILL", "--hostname=sandbox", "--workdir=/"),
            f"--user={user}",
            *([] if uid is None else [f"--ulimit=nproc={limits.processes}:{limits.processes}"]),
            *self._engine.run_options,
            *(word for place in dict.fromkeys(in_memory) for word in ("--tmpfs", f"{place}:{tmpfs}")),
            *(
                f"--mount=type=bind,source={source},target={place},readonly"
                for place, source in {**read, **task.folders}.items()
            ),
            *("--entrypoint=python3", made.image.id, "-I", "/clawloop/inside.py"),
        ]

    async def _answer(self, command: list[str], name: str, task: BoxTask) -> BoxResult:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,  # its end ends the sandbox
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise SandboxFailed(f"{self._engine.program} did not start: {error}") from error
        except asyncio.CancelledError:
            with suppress(OSError):
                await self._end(await starting, name)
            raise
        limit = task.limits.artifact_bytes + task.limits.output_bytes + 64 * 1024
        try:
            async with asyncio.timeout(task.seconds + _GRACE_SECONDS):
                assert process.stdout is not None
                assert process.stderr is not None
                answer, errors = await asyncio.gather(
                    read_up_to(process.stdout, limit), read_up_to(process.stderr, 4096)
                )
                await process.wait()
        except TimeoutError:
            return BoxResult(None, b"", b"", "the sandbox did not answer in time")
        finally:
            await asyncio.shield(self._end(process, name))
        if process.returncode is not None and process.returncode < 0:
            raise SandboxFailed(f"{self._engine.program.name} was ended by signal {-process.returncode}")
        if process.returncode == _KILLED:
            raise SandboxFailed(f"the container was killed from outside, as {self._engine.program.name} says")
        if not answer and process.returncode in _NOT_STARTED:
            raise SandboxFailed(" ".join(errors.decode(errors="replace").split())[-300:])
        return parse_answer(answer, errors, task.limits)

    async def _end(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Remove the container; the program that began it ends by itself then, and is killed only if it does not.

        One that is killed while it makes a container may leave one without a name.
        """
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.to_thread(self._engine.remove, name)
        try:
            await asyncio.wait_for(process.wait(), _REMOVE_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await asyncio.to_thread(self._engine.remove, name)

    def sweep(self) -> int:
        """Remove the containers whose worker is dead, by their labels; returns how many.

        It goes before the sweep of folders: a container without a folder is removed, too.
        """
        try:
            names = self._engine.named_with(f"{OWNER_LABEL}={self._folders.owner}")
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("containers were not swept", extra={"why": str(error)})
            return 0
        dead = [name for name in names if not self._folders.in_use(name)]
        for name in dead:
            self._engine.remove(name)
        return len(dead)
