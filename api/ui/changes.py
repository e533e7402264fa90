"""Notices that something changed that the page shows: one query a second, however many pages are open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from clawloop.core.errors import StoreUnavailable
from clawloop.operations.training import TrainingBrowser

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
AWAY = "away"
"""The mark while PostgreSQL does not answer."""

Answer = TypeVar("Answer")


class ChangeUnknown(StoreUnavailable):
    """PostgreSQL does not answer, and whether a change is made is known once it does."""


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
        self._left: set[asyncio.Task[Any]] = set()  # changes whose request has ended

    async def mark(self) -> str:
        """A value that changes whenever a page's content changes, at most a second old; `AWAY` without PostgreSQL."""
        if self._mark == AWAY and self._lock.locked():
            return AWAY  # another request asks PostgreSQL already, which takes seconds if it does not answer
        async with self._lock:
            if self._mark is None or time.monotonic() - self._read_at >= CHECK_SECONDS:
                try:
                    self._mark = await self._store.mark()
                except StoreUnavailable:
                    self._mark = AWAY
                self._read_at = time.monotonic()
            return self._mark if self._mark == AWAY else f"{self._mark} {self._here()}"

    async def unless_away(
        self, work: Coroutine[Any, Any, Answer], reads_store: Callable[[], bool], *, goes_on: bool = False
    ) -> Answer:
        """The result of `work`, unless PostgreSQL falls silent meanwhile.

        Pages read with the patience of background work, half a minute: a busy server needs it. A server that fell
        silent in the second before is not known to be away when a page begins to read; so the page asks again while it
        waits, and is told within seconds.

        Args:
            reads_store: whether `work` has begun to read.
            goes_on: `work` changes something, so it is never cancelled half-way: the request is answered, and `work`
                ends by itself.

        Raises:
            StoreUnavailable: PostgreSQL fell silent meanwhile.
            ChangeUnknown: PostgreSQL fell silent, and `work` goes on.
        """
        answer, silence = asyncio.create_task(work), asyncio.create_task(self._silence(reads_store))
        left = False
        try:
            await asyncio.wait({answer, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                silence.result()
                if left := goes_on:
                    raise ChangeUnknown("PostgreSQL fell silent while something was changed")
                raise StoreUnavailable("PostgreSQL fell silent while a page was read")
            return answer.result()
        finally:
            silence.cancel()
            if left:
                self._left.add(answer)
                answer.add_done_callback(self._ended)
            else:
                answer.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a change of the page failed after PostgreSQL fell silent: %s", type(error).__name__)

    async def _silence(self, reads_store: Callable[[], bool]) -> None:
        """Return once PostgreSQL is known to be away."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if reads_store() and await self.mark() == AWAY:
                return
