"""Images of containers: pulled where they are missing, which is said, and looked into once."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from clawloop.errors import EpisodeUnusable, SandboxFailed, SetupError
from clawloop.sandboxes.boxes import BoxResult
from clawloop.sandboxes.container_engine import ContainerEngine
from clawloop.sandboxes.contents import TAKEN, working_folder

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
