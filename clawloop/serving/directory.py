"""The policies and engines as PostgreSQL last gave them; the last snapshot stays in use while PostgreSQL is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from clawloop.core.contracts.serving import Directory, Policy
from clawloop.core.errors import StoreUnavailable

log = logging.getLogger(__name__)

# Longest time until a new version or engine is seen without a change notification; the query is small.
REFRESH_SECONDS = 1.0
# A request that misses a version or engine waits this long for PostgreSQL: two refreshes, and one that times out.
RETRY_SECONDS = 3.0


class DirectoryCache:
    """Use as an async context manager: inside it the directory is refreshed.

    Args:
        read: the current policies and engines, from PostgreSQL. Raises StoreUnavailable.
        changes: yields after each change of the directory, and after changes may have been missed, and never ends by
            itself; without it a change is seen within a second.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Directory]],
        changes: Callable[[], AsyncIterator[None]] | None = None,
    ) -> None:
        self._read_store = read
        self._changes = changes
        self._snapshot: Directory | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._refreshing = asyncio.Lock()  # or an older read could end after a newer one
        self._refreshes = 0
        self.up_to_date = False  # the last refresh succeeded
        self._was_refreshed = asyncio.Event()  # set while `up_to_date`

    async def __aenter__(self) -> DirectoryCache:
        await self._refresh()
        self._tasks.append(asyncio.create_task(self._refresh_periodically()))
        if self._changes is not None:
            self._tasks.append(asyncio.create_task(self._refresh_on(self._changes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def snapshot(self) -> Directory:
        """The directory as last read; empty before the first refresh succeeded."""
        return self._snapshot or Directory(policies=(), engines=())

    def policy(self, name: str) -> Policy:
        """The policy of this name in the snapshot.

        Raises:
            StoreUnavailable: the snapshot has no such policy.
        """
        for policy in self.snapshot.policies:
            if policy.id == name:
                return policy
        raise StoreUnavailable(f"the directory has no policy {name!r} yet")

    async def find_policy(self, name: str) -> Policy:
        """The policy of this name; refreshes the directory if the snapshot lacks it.

        Raises:
            StoreUnavailable: there is none, or PostgreSQL does not answer.
        """
        try:
            return self.policy(name)
        except StoreUnavailable:
            await self.refresh()
            return self.policy(name)

    async def refresh(self) -> None:
        """Read the directory once more; callers that wait together share one read.

        While PostgreSQL is away callers send no further query, and wait a moment for the periodic refresh to succeed.

        Raises:
            StoreUnavailable: PostgreSQL stays away.
        """
        before = self._refreshes
        async with self._refreshing:
            if self.up_to_date and self._refreshes == before:
                await self._read()
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await self._was_refreshed.wait()
        except TimeoutError:
            raise StoreUnavailable("PostgreSQL does not answer, and the directory lacks what is asked for") from None

    async def _refresh_periodically(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self._refresh_or_log()

    async def _refresh_on(self, changes: Callable[[], AsyncIterator[None]]) -> None:
        async for _ in changes():
            await self._refresh_or_log()

    async def _refresh_or_log(self) -> None:
        try:
            await self._refresh()
        except Exception:  # the task must go on, or the gateway would route by an old directory for ever
            log.exception("directory not read")

    async def _refresh(self) -> None:
        async with self._refreshing:
            await self._read()

    async def _read(self) -> None:
        self._refreshes += 1
        try:
            self._snapshot = await self._read_store()
        except StoreUnavailable as error:
            if self.up_to_date or self._snapshot is None:
                log.warning("directory not readable", extra={"why": str(error)})
            self.up_to_date = False
            self._was_refreshed.clear()
        else:
            self.up_to_date = True
            self._was_refreshed.set()
