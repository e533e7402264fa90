"""Deletes adapters from disk that no engine or step needs, and directories that attempts at ended steps left behind.

The store decides what is needed. A version that an engine has keeps its files.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from activities.serving.ports import AdapterFiles, PublishingStore
from clawloop.errors import AdapterUnusable

log = logging.getLogger(__name__)

# A vLLM engine crashes on a request for a version whose directory is gone, so this is long after every engine has
# unloaded the version.
MIN_AGE = timedelta(hours=1)


class Retention:
    """
    Args:
        min_age: how old a version must be to be deleted.
    """

    def __init__(self, store: PublishingStore, files: AdapterFiles, min_age: timedelta = MIN_AGE) -> None:
        self._store = store
        self._files = files
        self._min_age = min_age

    async def remove(self) -> int:
        """Delete what is not needed; the number of directories.

        Raises:
            StoreUnavailable
        """
        if not await self._files.are_here():
            return 0
        removed = 0
        for version in await self._store.removable(self._min_age):
            # Marked first: a roll-back to it is refused from then on, or comes first and keeps the files. Files of a
            # marked version are leftover, so that the next sweep deletes them if this one dies before.
            if await self._store.mark_removed(version.policy, version.n, self._min_age):
                removed += await self._remove(version.path)
        if directories := await self._files.directories():
            for directory in await self._store.leftover(directories):
                removed += await self._remove(directory.path)
        return removed

    async def _remove(self, path: str) -> bool:
        try:
            return await self._files.remove(path)
        except AdapterUnusable as error:
            log.warning("adapter not removed", extra={"directory": path, "why": str(error)})
            return False
