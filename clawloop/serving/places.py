"""A bound on what several owners have on one engine at once, and a fair order for what waits.

Next is the owner that holds least there and elsewhere, and of several such the one that waits longest. So a key with a
thousand requests delays the first one of another key until the next place is free, and no longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    amount: int
    takes: Callable[[str], bool]
    place: asyncio.Future[str]
    keeps: str | None = None  # the one engine whose free places are kept until they are enough for it


class Places:
    """
    Args:
        limit: places on each engine. A request that wants more takes all, when no other has any.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # by owner
        self._waiting: dict[str, deque[_Waiting]] = {}  # by owner, none of them empty
        self._arrived = 0

    def is_free(self, engine: str, amount: int) -> bool:
        """True if a request may take its places at once: enough are free, and no other request waits."""
        return not self._waiting and self._has_room(engine, amount)

    def take(self, engine: str, owner: str, amount: int) -> None:
        amount = min(amount, self.limit)
        self._used[engine] += amount
        self._held[owner] += amount

    def give_back(self, engine: str, owner: str, amount: int) -> None:
        amount = min(amount, self.limit)
        self._used[engine] -= amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]
        self.hand_out(engine)

    async def wait(
        self, engines: Iterable[str], owner: str, amount: int, takes: Callable[[str], bool], seconds: float | None
    ) -> str:
        """Wait for places; the engine on which the request has them then.

        Args:
            engines: those that the request could use now.
            takes: whether the request could use an engine; asked when the engine has a free place.
            seconds: longest wait; None: unlimited.

        Raises:
            TimeoutError: the request got no place in time.
        """
        self._arrived += 1
        waiting = _Waiting(self._arrived, amount, takes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(waiting)
        for engine in engines:  # requests ahead may wait for another engine
            self.hand_out(engine)
        try:
            async with asyncio.timeout(seconds):
                return await waiting.place
        except (asyncio.CancelledError, TimeoutError):
            if waiting.place.done() and not waiting.place.cancelled():
                self.give_back(waiting.place.result(), owner, amount)  # it came in the same moment
            else:
                self._leave(owner, waiting)
                if waiting.keeps is not None:
                    self.hand_out(waiting.keeps)
            raise

    def hand_out(self, engine: str) -> None:
        """Give the engine's free places to those who are next."""
        order: list[tuple[int, int, str, _Waiting]] = []
        for owner in self._waiting:
            self._queue(order, owner, engine)
        kept: set[str] = set()
        while order and self._has_room(engine, 1):
            _, _, owner, first = heappop(order)
            if not self._has_room(engine, first.amount):
                first.keeps = engine  # for who wants several places the next ones are kept, on this engine alone
                break
            self.take(engine, owner, first.amount)
            first.place.set_result(engine)
            self._leave(owner, first)
            if first.keeps not in (None, engine):
                kept.add(first.keeps)
            self._queue(order, owner, engine)
        for other in kept:
            self.hand_out(other)

    def _queue(self, order: list[tuple[int, int, str, _Waiting]], owner: str, engine: str) -> None:
        """Add the owner's first request that could go to the engine."""
        for waiting in self._waiting.get(owner, ()):
            if not waiting.place.done() and waiting.takes(engine) and self._may_take(waiting, engine):
                heappush(order, (self._held[owner], waiting.number, owner, waiting))
                return

    def _may_take(self, waiting: _Waiting, engine: str) -> bool:
        """Not if another engine's places are kept for it, unless it could go to this one at once."""
        if waiting.keeps in (None, engine) or self._has_room(engine, waiting.amount):
            return True
        return not waiting.takes(waiting.keeps)

    def _has_room(self, engine: str, amount: int) -> bool:
        return self._used[engine] + min(amount, self.limit) <= self.limit

    def _leave(self, owner: str, waiting: _Waiting) -> None:
        line = self._waiting.get(owner)
        if line is not None and waiting in line:
            line.remove(waiting)
            if not line:
                del self._waiting[owner]
