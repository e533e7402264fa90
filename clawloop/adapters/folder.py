"""The folder in which versions lie. Knows nothing about which of them are needed, nor what is in them."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

from clawloop.contracts.training import AdapterDirectory
from clawloop.errors import AdapterUnusable

# As the trainer names them once they are whole, and as `remove` does before it deletes them.
_VERSION = re.compile(r"(?:\.removing-)?(?P<name>v(?P<n>[1-9][0-9]{0,8})-[0-9a-f]{12})")


class AdapterFolder:
    """Satisfies `activities.training.ports.AdapterFiles`.

    Args:
        path: the data folder's `adapters`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    async def are_here(self) -> bool:
        """Whether there is such a folder: else another machine has it."""
        return await asyncio.to_thread(self._path.is_dir)

    async def directories(self) -> list[AdapterDirectory]:
        """The finished ones there are here, and those whose removal was cut short, in the order of their paths."""
        return await asyncio.to_thread(self._directories)

    def _directories(self) -> list[AdapterDirectory]:
        found = {
            AdapterDirectory(path.parent.name, int(name["n"]), f"{path.parent.name}/{name['name']}")
            for path in self._path.glob("*/*")
            if (name := _VERSION.fullmatch(path.name)) is not None and path.is_dir()
        }
        return sorted(found, key=lambda directory: directory.path)

    async def remove(self, path: str) -> bool:
        """Delete a version's directory; one that is gone is no error.

        Args:
            path: as in `VersionRef`.

        Returns:
            False if the folder itself is not here: then another machine has it.

        Raises:
            AdapterUnusable: the directory cannot be deleted, or does not lie in this folder.
        """
        return await asyncio.to_thread(self._remove, path)

    def _remove(self, relative: str) -> bool:
        if not self._path.is_dir():
            return False
        path = (self._path / relative).resolve()
        if not path.is_relative_to(self._path) or path.parent == self._path or path == self._path:
            raise AdapterUnusable(f"{relative} is not a version's directory")
        try:
            # First out of its name: a directory of this name is whole or not there.
            if path.is_dir():
                leaving = path.with_name(f".removing-{path.name}")
                path.rename(leaving)
            for left in path.parent.glob(f".removing-{path.name}"):
                shutil.rmtree(left)
        except OSError as error:
            raise AdapterUnusable(f"{path} cannot be deleted: {error.strerror}") from error
        return True
