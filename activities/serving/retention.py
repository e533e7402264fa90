"""Deletes adapters from disk that no engine or step needs, and directories that attempts at ended steps left behind.

The store decides what is needed. A version that an engine has keeps its files.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from activities.serving.publishing import PublishingStore
from clawloop.core.adapters.directory import AdapterFolder
from clawloop.core.errors import AdapterUnusable

log = logging.getLogger(__name__)

# A vLLM engine crashes on a request for a version whose directory is gone, so this is long after every engine has
# unloaded the version.
MIN_AGE = timedelta(hours=1)
# Minimum age of a deleted version while the disk fills up. Gateways hold a request for 150 s at most, and follow an
# engine's versions within a second.
MIN_AGE_ON_FULL_DISK = timedelta(minutes=5)


class Retention:
    """
    Args:
        min_age: how old a version must be to be deleted.
        wanted_free: bytes; with less free on the disk, versions are deleted sooner.
    """

    def __init__(
        self, store: PublishingStore, files: AdapterFolder, min_age: timedelta = MIN_AGE, wanted_free: int = 0
    ) -> None:
        self._store = store
        self._files = files
        self._min_age = min_age
        self._wanted_free = wanted_free

    async def remove(self) -> int:
        """Delete the directories of adapters that nothing needs; returns their number.

        Raises:
            StoreUnavailable
        """
        if not await self._files.are_here():
            return 0
        removed = 0
        age = await self._age()
        for version in await self._store.removable(age):
            # Marked first: a roll-back to it is refused from then on, or comes first and keeps the files. Files of a
            # marked version are leftover, so that the next sweep deletes them if this one dies before.
            marked = await self._store.mark_removed(version.policy, version.n, age)
            if marked and not await self._store.has_files_at(version.path):
                removed += await self._remove(version.path)
        if directories := await self._files.directories():
            for directory in await self._store.leftover(directories):
                removed += await self._remove(directory.path)
        return removed

    async def _age(self) -> timedelta:
        free = await self._files.free_bytes()
        if free >= self._wanted_free:
            return self._min_age
        log.warning("the disk fills, adapters are deleted sooner", extra={"free_mib": free // 2**20})
        return min(self._min_age, MIN_AGE_ON_FULL_DISK)

    async def _remove(self, path: str) -> bool:
        try:
            return await self._files.remove(path)
        except AdapterUnusable as error:
            log.warning("adapter not removed", extra={"directory": path, "why": str(error)})
            return False
