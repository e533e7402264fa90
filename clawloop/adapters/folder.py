"""The folder of all versions: lists and removes their directories."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

from clawloop.contracts.adapter_directory import AdapterDirectory
from clawloop.errors import AdapterUnusable

# A complete version's directory, or one that `remove` renamed before deleting it.
_VERSION = re.compile(r"(?:\.removing-)?(?P<name>v(?P<n>[1-9][0-9]{0,8})-[0-9a-f]{12})")


class AdapterFolder:
    """Satisfies `activities.serving.retention.AdapterFiles`.

    Args:
        path: the data folder's `adapters`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    async def are_here(self) -> bool:
        """True if the folder exists on this machine; if not, another machine has it."""
        return await asyncio.to_thread(self._path.is_dir)

    async def free_bytes(self) -> int:
        """Free bytes of the folder's disk."""
        return await asyncio.to_thread(lambda: shutil.disk_usage(self._path).free)

    async def directories(self) -> list[AdapterDirectory]:
        """Complete versions and those whose removal was interrupted, sorted by path."""
        return await asyncio.to_thread(self._directories)

    def _directories(self) -> list[AdapterDirectory]:
        directories = {
            AdapterDirectory(path.parent.name, int(name["n"]), f"{path.parent.name}/{name['name']}")
            for path in self._path.glob("*/*")
            if (name := _VERSION.fullmatch(path.name)) is not None and path.is_dir()
        }
        return sorted(directories, key=lambda directory: directory.path)

    async def remove(self, path: str) -> bool:
        """Deletes a version's directory. Idempotent.

        Args:
            path: as in `VersionRef`.

        Returns:
            False if the folder does not exist on this machine, so another machine has it.

        Raises:
            AdapterUnusable: the directory cannot be deleted, or is not in this folder.
        """
        return await asyncio.to_thread(self._remove, path)

    def _remove(self, relative: str) -> bool:
        if not self._path.is_dir():
            return False
        path = (self._path / relative).resolve()
        if not path.is_relative_to(self._path) or path.parent == self._path or path == self._path:
            raise AdapterUnusable(f"{relative} is not a version's directory")
        try:
            # Renamed first, so that a directory of this name is always complete.
            if path.is_dir():
                path.rename(path.with_name(f".removing-{path.name}"))
            for renamed in path.parent.glob(f".removing-{path.name}"):
                shutil.rmtree(renamed)
        except OSError as error:
            raise AdapterUnusable(f"{path} cannot be deleted: {error.strerror}") from error
        return True
