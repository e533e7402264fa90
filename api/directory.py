"""The policies and engines as the gateway last saw them; goes on with what it knows while Postgres is away.

Knows nothing about engines' health.
"""

from __future__ import annotations

import asyncio
import logging

from api.ports import DirectoryChanges, DirectoryStore
from clawloop.contracts.serving import Directory, Policy
from clawloop.errors import StoreUnavailable

log = logging.getLogger(__name__)

# How long a new version or engine may go unseen where nobody tells of it; one small query.
REFRESH_SECONDS = 1.0
# How long a request that misses something waits for Postgres to answer again: two looks, and one that times out.
PATIENCE_SECONDS = 3.0


class DirectoryCache:
    """Use as an async context manager: inside it the directory is kept fresh.

    Args:
        notices: tell of changes as they happen; without them they are seen within a second.
    """

    def __init__(self, store: DirectoryStore, notices: DirectoryChanges | None = None) -> None:
        self._store = store
        self._notices = notices
        self._last: Directory | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._looking = asyncio.Lock()  # or an older look could end after a newer one
        self._looks = 0
        self.up_to_date = False  # the last look succeeded
        self._seen = asyncio.Event()  # set while `current`

    async def __aenter__(self) -> DirectoryCache:
        await self._look()
        self._tasks.append(asyncio.create_task(self._keep_looking()))
        if self._notices is not None:
            self._tasks.append(asyncio.create_task(self._listen(self._notices)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def snapshot(self) -> Directory:
        """What is known; empty before the first look succeeded."""
        return self._last or Directory(policies=(), engines=())

    def policy(self, name: str) -> Policy:
        """
        Raises:
            StoreUnavailable: this gateway has not seen that policy yet.
        """
        for policy in self.snapshot.policies:
            if policy.id == name:
                return policy
        raise StoreUnavailable(f"policy {name!r} is not known here yet")

    async def find_policy(self, name: str) -> Policy:
        """As `policy`, and looks afresh before it says that there is none.

        Raises:
            StoreUnavailable: there is none, or Postgres does not answer.
        """
        try:
            return self.policy(name)
        except StoreUnavailable:
            await self.refresh()
            return self.policy(name)

    async def refresh(self) -> None:
        """For whoever misses something that may be newer than the last look; those who wait together share one look.

        While Postgres is away they ask nothing more of it, and wait a moment for the looks that go on anyway.

        Raises:
            StoreUnavailable: it stays away, so nobody can say whether there is such a thing.
        """
        before = self._looks
        async with self._looking:
            if self.up_to_date and self._looks == before:
                await self._look_now()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._seen.wait()
        except TimeoutError:
            raise StoreUnavailable("PostgreSQL does not answer, and what is asked for is not known here yet") from None

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._look()
            except Exception:  # or the gateway would route by an old directory for ever
                log.exception("directory not read")

    async def _listen(self, notices: DirectoryChanges) -> None:
        async for _ in notices.changes():
            try:
                await self._look()
            except Exception:  # the next look may succeed
                log.exception("directory not read")

    async def _look(self) -> None:
        async with self._looking:
            await self._look_now()

    async def _look_now(self) -> None:
        self._looks += 1
        try:
            self._last = await self._store.read()
        except StoreUnavailable as error:
            if self.up_to_date or self._last is None:
                log.warning("directory not readable", extra={"why": str(error)})
            self.up_to_date = False
            self._seen.clear()
        else:
            self.up_to_date = True
            self._seen.set()
