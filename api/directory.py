"""The policies and engines as the gateway last saw them; goes on with what it knows while Postgres is away.

Knows nothing about engines' health.
"""

from __future__ import annotations

import asyncio
import logging

from api.ports import DirectoryStore
from clawloop.contracts import Directory, Policy
from clawloop.errors import StoreUnavailable

log = logging.getLogger(__name__)

# How long a new version or engine may go unseen; one small query.
REFRESH_SECONDS = 1.0


class DirectoryCache:
    """Use as an async context manager: inside it the directory is kept fresh."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self._last: Directory | None = None
        self._refresh: asyncio.Task[None] | None = None
        self.current = False  # the last look succeeded

    async def __aenter__(self) -> DirectoryCache:
        await self._look()
        self._refresh = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._refresh is not None:
            self._refresh.cancel()
            await asyncio.wait([self._refresh])

    @property
    def now(self) -> Directory:
        """What is known; empty before the first look succeeded."""
        return self._last or Directory(policies=(), engines=())

    def policy(self, name: str) -> Policy:
        """
        Raises:
            StoreUnavailable: this gateway has not seen that policy yet.
        """
        for policy in self.now.policies:
            if policy.id == name:
                return policy
        raise StoreUnavailable(f"policy {name!r} is not known here yet")

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._look()
            except Exception:  # or the gateway would route by an old directory for ever
                log.exception("directory not read")

    async def _look(self) -> None:
        try:
            self._last = await self._store.read()
        except StoreUnavailable as error:
            if self.current or self._last is None:
                log.warning("directory not readable", extra={"why": str(error)})
            self.current = False
        else:
            self.current = True
