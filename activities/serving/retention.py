"""Adapters on disk: those nobody needs any more go, an hour after they were made at the earliest; so do those of
attempts at a step that was given up or that another attempt finished.

Knows nothing about what is needed; the store says that. An engine that has a version keeps its files.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from activities.training.ports import AdapterFiles, PublishingStore
from clawloop.errors import AdapterUnusable

log = logging.getLogger(__name__)

# A request for a version whose directory is gone ends a vLLM: long after every engine has unloaded it.
AGE = timedelta(hours=1)


class Retention:
    """
    Args:
        age: how old a version must be.
    """

    def __init__(self, store: PublishingStore, files: AdapterFiles, age: timedelta = AGE) -> None:
        self._store = store
        self._files = files
        self._age = age

    async def remove(self) -> int:
        """Delete what nobody needs; how many directories.

        Raises:
            StoreUnavailable
        """
        if not await self._files.are_here():
            return 0
        removed = 0
        for version in await self._store.removable(self._age):
            # Marked first: whoever rolls back to it meanwhile is refused, or has it kept. Files of a marked version
            # are leftover, so that the next sweep deletes them if we do not come to it.
            if await self._store.mark_removed(version.policy, version.n, self._age):
                removed += await self._remove(version.path)
        if there := await self._files.directories():
            for directory in await self._store.leftover(there):
                removed += await self._remove(directory.path)
        return removed

    async def _remove(self, path: str) -> bool:
        try:
            return await self._files.remove(path)
        except AdapterUnusable as error:
            log.warning("adapter not removed", extra={"directory": path, "why": str(error)})
            return False
