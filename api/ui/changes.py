"""Notices that something changed that the page shows: one query a second, however many pages are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from api.ports import TrainingBrowser
from clawloop.errors import StoreUnavailable

CHECK_SECONDS = 1.0
AWAY = "away"
"""The mark while PostgreSQL does not answer."""


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
        self._mark = AWAY

    async def mark(self) -> str:
        """A value that is another one once something changed, at most a second old; `AWAY` without PostgreSQL."""
        async with self._lock:
            if time.monotonic() - self._read_at >= CHECK_SECONDS:
                try:
                    self._mark = await self._store.mark()
                except StoreUnavailable:
                    self._mark = AWAY
                self._read_at = time.monotonic()
            return self._mark if self._mark == AWAY else f"{self._mark} {self._here()}"
