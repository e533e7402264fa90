"""Notices that something changed that the page shows: one query a second, however many pages are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from api.ports import TrainingBrowser
from clawloop.errors import StoreUnavailable

CHECK_SECONDS = 1.0
AWAY = "away"
"""The mark while PostgreSQL does not answer."""

Answer = TypeVar("Answer")


class Changes:
    """
    Args:
        here: what pages show that this gateway alone knows; another value is a change.
    """

    def __init__(self, store: TrainingBrowser, here: Callable[[], object] = lambda: None) -> None:
        self._store = store
        self._here = here
        self._lock = asyncio.Lock()
        self._read_at = -CHECK_SECONDS
        self._mark: str | None = None

    async def mark(self) -> str:
        """A value that is another one once something changed, at most a second old; `AWAY` without PostgreSQL."""
        if self._mark == AWAY and self._lock.locked():
            return AWAY  # somebody asks again, which takes seconds where nothing answers
        async with self._lock:
            if self._mark is None or time.monotonic() - self._read_at >= CHECK_SECONDS:
                try:
                    self._mark = await self._store.mark()
                except StoreUnavailable:
                    self._mark = AWAY
                self._read_at = time.monotonic()
            return self._mark if self._mark == AWAY else f"{self._mark} {self._here()}"

    async def unless_away(self, work: Coroutine[Any, Any, Answer], reads_store: Callable[[], bool]) -> Answer:
        """What `work` returns.

        Pages read with the patience of background work, half a minute: a busy server needs it. A server that fell
        silent in the second before is not known to be away when a page begins to read; so the page asks again while it
        waits, and is told within seconds.

        Args:
            reads_store: whether it has begun to read.

        Raises:
            StoreUnavailable: PostgreSQL fell silent meanwhile.
        """
        answer, silence = asyncio.create_task(work), asyncio.create_task(self._silence(reads_store))
        try:
            await asyncio.wait({answer, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                silence.result()
                raise StoreUnavailable("PostgreSQL fell silent while a page was read")
            return answer.result()
        finally:
            answer.cancel()
            silence.cancel()

    async def _silence(self, reads_store: Callable[[], bool]) -> None:
        """Return once PostgreSQL is known to be away."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if reads_store() and await self.mark() == AWAY:
                return
