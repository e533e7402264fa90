"""Stored bytes of the keys with a limit on them, read from PostgreSQL every few seconds, so that no chat waits.

A key may exceed its limit by the bytes that it stores within one interval. While PostgreSQL does not answer, the last
answer counts; the spool has a limit of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time

from api.ports import StoredByteCounts
from clawloop.contracts.serving import ApiKey
from clawloop.errors import RequestRejected, StoreUnavailable
from clawloop.ids import ApiKeyId

log = logging.getLogger(__name__)

# A key that stores 1 MB a second, which is far more than one engine writes, goes 10 MB over.
REFRESH_SECONDS = 10.0
# Others are not asked about: keys come and go.
_RECENT_SECONDS = 60.0
# A changed limit is read within 30 s, and room that was made is seen 10 s later.
_RETRY_SECONDS = 60
_MIB = 2**20


class StoredBytes:
    """Use as an async context manager: inside it the counts are refreshed.

    Args:
        default_mib: for keys without a limit of their own; None: no limit.
    """

    def __init__(self, counts: StoredByteCounts, default_mib: int | None = None) -> None:
        self._counts = counts
        self._default_mib = default_mib
        self._seen: dict[ApiKeyId, float] = {}
        self._stored: dict[ApiKeyId, int] = {}
        self._new_key = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StoredBytes:
        self._task = asyncio.create_task(self._refresh_again_and_again())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def require_room(self, key: ApiKey) -> None:
        """
        Raises:
            RequestRejected: 429; the key had stored its limit when PostgreSQL was last asked.
        """
        most = key.limits.stored_mib or self._default_mib
        if most is None or key.episode is not None:
            return
        if key.id not in self._seen:
            self._new_key.set()
        self._seen[key.id] = time.monotonic()
        if self._stored.get(key.id, 0) >= most * _MIB:
            raise RequestRejected(
                f"This key has stored its limit of {most} MiB of conversations. An operator makes room by"
                " `clawloop erase`, or raises the limit: `clawloop key limit --stored-mib`.",
                status=429,
                code="storage_limit_exceeded",
                retry_after=str(_RETRY_SECONDS),
            )

    async def refresh(self) -> None:
        """
        Raises:
            StoreUnavailable
        """
        recent = time.monotonic() - _RECENT_SECONDS
        self._seen = {key: seen for key, seen in self._seen.items() if seen > recent}
        self._stored = await self._counts.stored_bytes(list(self._seen)) if self._seen else {}

    async def _refresh_again_and_again(self) -> None:
        while True:
            self._new_key.clear()
            try:
                await self.refresh()
            except StoreUnavailable as error:
                log.warning("what keys store is not known", extra={"why": str(error)})
                await asyncio.sleep(REFRESH_SECONDS)
                continue
            except Exception:  # a bug; the task must go on, or no key would reach its bound any more
                log.exception("what keys store is not known")
                await asyncio.sleep(REFRESH_SECONDS)
                continue
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._new_key.wait()
            except TimeoutError:
                pass
