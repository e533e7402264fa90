"""Chooses who makes a sandbox: containers for tasks that name an image, bubblewrap for all others."""

from __future__ import annotations

from collections.abc import Collection

from clawloop.errors import EpisodeUnusable, SetupError
from clawloop.sandboxes.boxes import BoxResult, BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.containers import Containers
from clawloop.sandboxes.folders import BoxFolders


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
