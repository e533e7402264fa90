"""Sandboxes by podman or docker, for tasks that name an image."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clawloop.core.errors import EpisodeUnusable, SandboxFailed, SetupError
from clawloop.sandboxes.answers import parse_answer, read_up_to
from clawloop.sandboxes.boxes import BoxResult, BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import TAKEN, BoxFolders, fill, give, own_uid, resource_limits, working_folder
from clawloop.sandboxes.relay import relaying

# The engine -----------------------------------------------------------------------------------------------------------
# podman or docker, by its program: found, asked, and told to remove containers.

_PROGRAMS = ("podman", "docker")
_PROBE_SECONDS = 20.0
_COMMAND_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """
    Args:
        is_podman: whatever the program is called; Debian's `podman-docker` calls it docker.
    """

    program: Path
    is_podman: bool

    @classmethod
    def find(cls) -> ContainerEngine:
        """The first of podman and docker that answers; asked once, when a worker starts.

        Raises:
            SetupError: none does.
        """
        problems = []
        for name in _PROGRAMS:
            found = shutil.which(name)
            if found is None:
                problems.append(f"there is no {name}")
                continue
            try:
                asked = subprocess.run([found, "info"], capture_output=True, timeout=_PROBE_SECONDS, check=False)
                version = subprocess.run([found, "--version"], capture_output=True, timeout=_PROBE_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"`{name} info` fails: {error}")
                continue
            if asked.returncode == 0:
                return cls(Path(found), version.stdout.lower().startswith(b"podman"))
            why = " ".join(asked.stderr.decode(errors="replace").split())[-200:]
            problems.append(f"`{name} info` fails ({why})")
        raise SetupError(f"no containers on this machine: {', and '.join(problems)}")

    def tmpfs_options(self, user: str) -> str:
        """Mount options that give a tmpfs to the container's user, and keep it empty.

        Over a folder that the image has, runc gives it that folder's mode, so that only its owner can write. podman
        would copy into it what the image has there.

        Args:
            user: of `user`.
        """
        uid, _, gid = user.partition(":")
        return "notmpcopyup,U" if self.is_podman else f"uid={uid},gid={gid}"

    @property
    def run_options(self) -> tuple[str, ...]:
        """podman makes further places writable, and passes proxies on."""
        return ("--read-only-tmpfs=false", "--http-proxy=false") if self.is_podman else ()

    def user(self, uid: int | None) -> str:
        """User and group of a container's processes: those of this process if it is not root.

        Args:
            uid: of the container's own; None if this process is not root.
        """
        if uid is not None:
            return f"{uid}:{uid}"
        # Without root podman gives containers a namespace of users, where 0 is this process's own.
        return "0:0" if self.is_podman else f"{os.geteuid()}:{os.getegid()}"

    def ask(self, *words: str, seconds: float = _COMMAND_SECONDS) -> subprocess.CompletedProcess[bytes]:
        """
        Raises:
            OSError, subprocess.TimeoutExpired
        """
        return subprocess.run([str(self.program), *words], capture_output=True, timeout=seconds, check=False)

    def remove(self, name: str) -> None:
        """Kill and remove a container with its volumes, if it is there."""
        try:
            self.ask("rm", "--force", "--volumes", name)
        except (OSError, subprocess.TimeoutExpired):
            return  # the sweep tries again

    def named_with(self, label: str) -> list[str]:
        """Names of the containers with this label, in whatever state.

        Raises:
            OSError, subprocess.SubprocessError: the program does not answer.
        """
        listed = self.ask("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}")
        listed.check_returncode()
        return listed.stdout.decode(errors="replace").split()

    def has_image(self, identity: str) -> bool:
        """True if the image of this id is on the machine.

        Raises:
            OSError, subprocess.SubprocessError: the program does not answer, which asking for the image alone would not
                tell from an image that is gone.
        """
        listed = self.ask("image", "ls", "--all", "--quiet", "--no-trunc")
        listed.check_returncode()
        # podman inspects ids without the prefix, and lists them with it.
        ids = {one.removeprefix("sha256:") for one in listed.stdout.decode(errors="replace").split()}
        return identity.removeprefix("sha256:") in ids


# Images ---------------------------------------------------------------------------------------------------------------
# Images of containers: pulled where they are missing, which is said, and looked into once.

log = logging.getLogger(__name__)

# Folder with the files of images that set no working folder, as other tools assume.
DEFAULT_WORK = "/app"
PULL_SECONDS = 600.0
# An image that could not be used is not asked for again by each episode.
_REFUSED_SECONDS = 600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


@dataclass(frozen=True, slots=True)
class Image:
    """
    Args:
        name: as the task gives it.
        id: of its content: all containers of a worker have the same.
        work: its working folder.
        variables: of its configuration, e.g. PATH.
        volumes: where it would have disk space without a limit.
        files: a tar archive of what is in its working folder.
    """

    name: str
    id: str
    work: str
    variables: Mapping[str, str]
    volumes: Sequence[str]
    files: bytes = b""


def image_name(name: object) -> str:
    """
    Raises:
        SetupError: this is no name of an image.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SetupError(f"{name!r} is no name of an image")
    return name


class Images:
    """
    Args:
        content: runs a container of the image, whose artifact is what is in its working folder.
    """

    def __init__(self, engine: ContainerEngine, content: Callable[[Image], Awaitable[BoxResult]]) -> None:
        self._engine = engine
        self._content = content
        self._ready: dict[tuple[str, str | None], Image] = {}
        self._refused: dict[tuple[str, str | None], tuple[float, str]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def ready(self, name: str, folder: str | None = None) -> Image:
        """
        Args:
            folder: of `BoxTask.folder`.

        Raises:
            EpisodeUnusable: it cannot be pulled, or lacks what a sandbox needs.
            SandboxFailed: containers did not work.
        """
        async with self._locks[name]:
            if (name, folder) in self._ready:
                return self._ready[name, folder]
            until, why = self._refused.get((name, folder), (0.0, ""))
            if time.monotonic() < until:
                raise EpisodeUnusable(why)
            try:
                image = await asyncio.to_thread(self._found, name)
                image = replace(image, work=working_folder(folder, (image.work,)))
                self._ready[name, folder] = replace(image, files=await self._files(image))
            except EpisodeUnusable as error:
                self._refused[name, folder] = (time.monotonic() + _REFUSED_SECONDS, str(error))
                raise
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxFailed(f"{self._engine.program.name} does not answer: {error}") from error
            return self._ready[name, folder]

    async def forget_if_gone(self, image: Image) -> None:
        """If the image was removed from the machine, have the next user look for it, and pull it, again."""
        try:
            there = await asyncio.to_thread(self._engine.has_image, image.id)
        except (OSError, subprocess.SubprocessError):
            return
        if not there:  # and keep one that was pulled meanwhile
            self._ready = {key: known for key, known in self._ready.items() if known.id != image.id}

    def _found(self, name: str) -> Image:
        asked = self._inspected(name)
        if asked.returncode != 0:
            log.warning("pulling an image, which is not on this machine", extra={"image": name})
            try:
                pulled = self._engine.ask("pull", "--quiet", name, seconds=PULL_SECONDS)
            except subprocess.TimeoutExpired:
                raise EpisodeUnusable(f"the image {name} was not pulled in {PULL_SECONDS:g} s") from None
            if pulled.returncode != 0:
                why = " ".join(pulled.stderr.decode(errors="replace").split())[-200:]
                raise EpisodeUnusable(f"the image {name} cannot be pulled: {why}")
            asked = self._inspected(name)
            asked.check_returncode()
        identity, _, config = asked.stdout.decode().partition(" ")
        return image_of(name, identity, json.loads(config) or {})

    def _inspected(self, name: str) -> subprocess.CompletedProcess[bytes]:
        return self._engine.ask("image", "inspect", "--format", "{{.Id}} {{json .Config}}", name)

    async def _files(self, image: Image) -> bytes:
        try:
            copied = await self._content(image)
        except SandboxFailed as error:
            if "python3" not in str(error):
                raise
            raise EpisodeUnusable(f"the image {image.name} cannot be used: it has no python3") from error
        if copied.problem is not None or copied.exit_code != 0:
            why = copied.problem or " ".join(copied.output.decode(errors="replace").split())[-200:]
            raise EpisodeUnusable(
                f"the image {image.name} cannot be used: its folder {image.work} was not copied: {why}"
            )
        return copied.artifact


def image_of(name: str, identity: str, config: Mapping[str, object]) -> Image:
    """An image by what `image inspect` says of it.

    Raises:
        EpisodeUnusable: its working folder cannot be one.
    """
    work = str(config.get("WorkingDir") or "/").rstrip("/") or DEFAULT_WORK
    if TAKEN.fullmatch(work):
        raise EpisodeUnusable(f"the image {name} cannot be used: its working folder is {work}")
    variables, volumes = config.get("Env"), config.get("Volumes")
    pairs = [str(pair).partition("=") for pair in variables] if isinstance(variables, list) else []
    return Image(
        name,
        identity,
        work,
        {"PATH": "/usr/local/bin:/usr/bin:/bin", **{key: value for key, _, value in pairs}},
        sorted(volumes) if isinstance(volumes, dict) else (),
    )


# Sandboxes ------------------------------------------------------------------------------------------------------------
# Sandboxes by podman or docker, for tasks that name an image: its files, read-only, instead of the host's /usr.
#
# A container has no network, capability or writable place but folders in memory: the image's working folder, /tmp,
# /logs and /artifact. Its name is that of its folder, and labels say whose it is, so that those of dead workers are
# found.

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


# Choice ---------------------------------------------------------------------------------------------------------------
# Chooses who makes a sandbox: containers for tasks that name an image, bubblewrap for all others.


class SandboxesByImage:
    """Satisfies `clawloop.sandboxes.boxes.Sandboxes`.

    Args:
        containers: None: a task that names an image is refused.
    """

    def __init__(self, host: Bubblewrap, containers: Containers | None, folders: BoxFolders) -> None:
        self._host = host
        self._containers = containers
        self._folders = folders

    @classmethod
    def find(cls, folders: BoxFolders, images: Collection[str] = ()) -> SandboxesByImage:
        """
        Args:
            images: that tasks name; without any, no containers are looked for.

        Raises:
            SetupError: bubblewrap makes no sandboxes here, or there are images and no containers.
        """
        host = Bubblewrap.find(folders)
        try:
            containers = Containers.find(folders) if images else None
        except SetupError as error:
            raise SetupError(f"a task needs the image {min(images)}, and there are {error}") from None
        return cls(host, containers, folders)

    @property
    def with_images(self) -> bool:
        return self._containers is not None

    async def run(self, task: BoxTask) -> BoxResult:
        if task.image is None:
            return await self._host.run(task)
        if self._containers is None:
            raise EpisodeUnusable(f"the task needs the image {task.image}, and this worker has no containers")
        return await self._containers.run(task)

    def sweep(self) -> int:
        """Remove what dead workers left; returns how many containers and folders."""
        containers = 0 if self._containers is None else self._containers.sweep()
        return containers + self._folders.sweep()
