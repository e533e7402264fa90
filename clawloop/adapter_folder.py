"""The folder in which versions lie. Knows nothing about which of them are needed, nor what is in them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from clawloop.errors import AdapterUnusable
from clawloop.steps import VersionRef


class AdapterFolder:
    """Satisfies `activities.training_ports.AdapterFiles`.

    Args:
        path: the data folder's `adapters`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    async def remove(self, version: VersionRef) -> bool:
        """Delete a version's directory; one that is gone is no error.

        Returns:
            False if the folder itself is not here: then another machine has it.

        Raises:
            AdapterUnusable: the directory cannot be deleted, or does not lie in this folder.
        """
        return await asyncio.to_thread(self._remove, version)

    def _remove(self, version: VersionRef) -> bool:
        if not self._path.is_dir():
            return False
        path = (self._path / version.path).resolve()
        if not path.is_relative_to(self._path) or path.parent == self._path or path == self._path:
            raise AdapterUnusable(f"{version.path} is not a version's directory")
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
