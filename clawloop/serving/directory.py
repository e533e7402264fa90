"""Caches policies and engines; the cache stays in use while PostgreSQL is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from clawloop.contracts.serving import Directory, Policy
from clawloop.errors import StoreUnavailable

log = logging.getLogger(__name__)

# Longest delay of a new version or engine without notifications; one small query.
REFRESH_SECONDS = 1.0
# How long a request for something not in the cache waits for PostgreSQL: two reads, and one that times out.
PATIENCE_SECONDS = 3.0


class DirectoryStore(Protocol):
    async def read(self) -> Directory:
        """All policies and engines."""


class DirectoryChanges(Protocol):
    def changes(self) -> AsyncIterator[None]:
        """Yields when the directory changed, and when changes may have been missed; never ends by itself."""


class DirectoryCache:
    """The directory, refreshed inside the async context.

    Args:
        changes: notifications of changes; without them a change is seen within a second.
    """

    def __init__(self, store: DirectoryStore, changes: DirectoryChanges | None = None) -> None:
        self._store = store
        self._changes = changes
        self._last: Directory | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reading = asyncio.Lock()  # otherwise an older read could end after a newer one
        self._reads = 0
        self.current = False  # the last read succeeded
        self._is_current = asyncio.Event()  # set while `current`

    async def __aenter__(self) -> DirectoryCache:
        await self._refresh()
        self._tasks.append(asyncio.create_task(self._poll()))
        if self._changes is not None:
            self._tasks.append(asyncio.create_task(self._listen(self._changes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def now(self) -> Directory:
        """The cached directory; empty before the first successful read."""
        return self._last or Directory(policies=(), engines=())

    def policy(self, name: str) -> Policy:
        """A policy by its name.

        Raises:
            StoreUnavailable: the cache does not have the policy (yet).
        """
        for policy in self.now.policies:
            if policy.id == name:
                return policy
        raise StoreUnavailable(f"policy {name!r} is not in the directory yet")

    async def known_policy(self, name: str) -> Policy:
        """As `policy`, but refreshes the cache before raising.

        Raises:
            StoreUnavailable: there is no such policy, or PostgreSQL does not answer.
        """
        try:
            return self.policy(name)
        except StoreUnavailable:
            await self.refresh()
            return self.policy(name)

    async def refresh(self) -> None:
        """Read the directory, for a caller that misses something newer than the cache; concurrent calls share one read.

        While PostgreSQL is down this adds no read, but waits a moment for the periodic ones.

        Raises:
            StoreUnavailable: PostgreSQL stays down, so that the caller cannot know whether the missing thing exists.
        """
        before = self._reads
        async with self._reading:
            if self.current and self._reads == before:
                await self._read()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._is_current.wait()
        except TimeoutError:
            raise StoreUnavailable(
                "PostgreSQL does not answer, and the cache does not have what is asked for"
            ) from None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._refresh()
            except Exception:  # otherwise the gateway would route by an old directory for ever
                log.exception("directory not read")

    async def _listen(self, changes: DirectoryChanges) -> None:
        async for _ in changes.changes():
            try:
                await self._refresh()
            except Exception:  # the next read may succeed
                log.exception("directory not read")

    async def _refresh(self) -> None:
        async with self._reading:
            await self._read()

    async def _read(self) -> None:
        self._reads += 1
        try:
            self._last = await self._store.read()
        except StoreUnavailable as error:
            if self.current or self._last is None:
                log.warning("directory not readable", extra={"why": str(error)})
            self.current = False
            self._is_current.clear()
        else:
            self.current = True
            self._is_current.set()
