"""Chooses the engine of a request, and bounds the requests that each engine has at once."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from prometheus_client import Gauge

from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import EnginesBusy, EngineUnavailable

# Places ---------------------------------------------------------------------------------------------------------------
# A bound on what several owners have on one engine at once, and a fair order for what waits.
#
# Next is the owner that holds least there and elsewhere, and of several such the one that waits longest. So a key with
# a thousand requests delays the first one of another key until the next place is free, and no longer.


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
        """False if places of another engine are kept for the request, unless this engine has room at once."""
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


# Rotation -------------------------------------------------------------------------------------------------------------
# Choice of the engine for a request: a healthy one that has the version and is not draining.
#
# A session stays on the engine whose prefix cache has it, unless that engine has more than `AFFINITY_SLACK` requests
# more than the least busy one. Where chats may take only so many places of an engine, the rest stays free for judges,
# the gate and probes, which ask engines without a gateway.

# Prefilling a long prompt costs about as much as waiting for a few short requests.
AFFINITY_SLACK = 8
# Share of the held requests that one policy may have: if no engine has its version, it leaves room for other policies.
HELD_SHARE = 0.75
# After this time the directory has the engine's adapters: its agent reports every 2 s, the gateway reads every second.
MISSING_SECONDS = 5.0
# OpenAI's clients give up a request after this time; an engine's own queue would hold it while the client waits.
PLACE_SECONDS = 600.0
# A request that waits for a place looks so often whether any engine could still take it.
_LOOK_SECONDS = 1.0


class Rotation:
    """Health and load of each engine, and the requests that wait for one.

    Args:
        engines: the engines now in the directory.
        hold_seconds: how long a request waits while no engine can take it.
        hold_limit: how many requests may wait, of one policy three quarters; the next is refused immediately.
        held: gauge of the waiting requests.
        places: how many choices of chats each engine may have at once; None: no bound.
        place_seconds: how long a request waits for those.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        *,
        hold_seconds: float,
        hold_limit: int,
        held: Gauge,
        places: int | None = None,
        place_seconds: float = PLACE_SECONDS,
    ) -> None:
        self._engines = engines
        self._hold_seconds = hold_seconds
        self._hold_limit = hold_limit
        self._held = held
        self._places = None if places is None else Places(places)
        self._place_seconds = place_seconds
        self._waiting: Counter[str] = Counter()  # by policy
        self._healthy: set[str] = set()
        self._load: Counter[str] = Counter()
        self._missing: dict[tuple[str, str, int], float] = {}
        self._changed = asyncio.Event()

    def mark(self, engine_id: str, *, healthy: bool) -> None:
        if healthy:
            self._healthy.add(engine_id)
            self._changed.set()
            if self._places is not None:
                self._places.hand_out(engine_id)
        else:
            self._healthy.discard(engine_id)

    def mark_missing(self, engine_id: str, policy: str, version: int) -> None:
        """Send the engine no request for this version for a while: it lacks it, though the directory lists it."""
        self._missing[engine_id, policy, version] = time.monotonic() + MISSING_SECONDS

    def keep_only(self, engine_ids: set[str]) -> None:
        """Forget all engines but these."""
        self._healthy &= engine_ids
        now = time.monotonic()
        self._missing = {key: until for key, until in self._missing.items() if until > now and key[0] in engine_ids}

    def healthy(self) -> frozenset[str]:
        return frozenset(self._healthy)

    def has_version(self, policy: str, version: int) -> bool:
        return any(_has_version(engine, policy, version) for engine in self._engines())

    async def acquire(
        self,
        policy: str,
        version: int,
        affinity: str,
        avoid: str | None = None,
        *,
        owner: str = "",
        choices: int = 0,
    ) -> Engine:
        """The engine for this request; call `release` with the same owner and choices when the request has ended.

        Args:
            avoid: an engine that just failed this request; chosen only if there is no other.
            owner: whose request it is; owners get places in turn.
            choices: sequences that the engine is to sample; 0: none, and no place is needed.

        Raises:
            EngineUnavailable: for `hold_seconds` no engine could take it, or too many requests wait already.
            EnginesBusy: the engines that could had no free place within `place_seconds`.
        """
        engine = self._choose(policy, version, affinity, avoid, choices)
        if engine is None:
            engine = await self._wait(policy, version, affinity)
        if choices and self._places is not None:
            if self._places.is_free(engine.id, choices):
                self._places.take(engine.id, owner, choices)
            else:
                engine = await self._wait_for_place(policy, version, owner, choices)
        self._load[engine.id] += 1
        return engine

    def release(self, engine: Engine, *, owner: str = "", choices: int = 0) -> None:
        self._load[engine.id] -= 1
        if choices and self._places is not None:
            self._places.give_back(engine.id, owner, choices)

    async def _wait_for_place(self, policy: str, version: int, owner: str, choices: int) -> Engine:
        assert self._places is not None

        usable: dict[str, Engine] = {}

        def takes(engine_id: str) -> bool:
            nonlocal usable
            usable = {engine.id: engine for engine in self._ready(policy, version)}
            return engine_id in usable

        ready = [engine.id for engine in self._ready(policy, version)]

        self._held.inc()
        lost = asyncio.timeout(None)
        try:
            async with lost:
                looking = asyncio.create_task(self._expire_when_lost(lost, policy, version))
                try:
                    chosen = await self._places.wait(ready, owner, choices, takes, self._place_seconds)
                finally:
                    looking.cancel()
        except TimeoutError:
            if lost.expired():
                raise self._no_engine() from None
            raise EnginesBusy(self._places.limit, self._place_seconds) from None
        finally:
            self._held.dec()
        return usable[chosen]

    async def _expire_when_lost(self, lost: asyncio.Timeout, policy: str, version: int) -> None:
        """End a wait for a place when for `hold_seconds` no engine could take the request."""
        loop = asyncio.get_running_loop()
        could = loop.time()
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._hold_seconds))
            if self._ready(policy, version):
                could = loop.time()
            elif loop.time() - could >= self._hold_seconds:
                lost.reschedule(loop.time())
                return

    def _no_engine(self) -> EngineUnavailable:
        return EngineUnavailable(f"no engine could take the request in {self._hold_seconds:.0f} s")

    async def _wait(self, policy: str, version: int, affinity: str) -> Engine:
        waiting, own = self._waiting.total(), self._waiting[policy]
        if waiting >= self._hold_limit or own >= math.ceil(self._hold_limit * HELD_SHARE):
            raise EngineUnavailable(f"no engine can take the request and {waiting} requests wait for one already")
        self._waiting[policy] += 1
        self._held.inc()
        try:
            async with asyncio.timeout(self._hold_seconds):
                while True:
                    self._changed.clear()
                    engine = self._choose(policy, version, affinity)
                    if engine is not None:
                        return engine
                    await self._changed.wait()
        except TimeoutError:
            raise self._no_engine() from None
        finally:
            self._waiting[policy] -= 1
            self._waiting += Counter()  # forgets policies of which none waits
            self._held.dec()

    def _ready(self, policy: str, version: int) -> list[Engine]:
        return [
            engine
            for engine in self._engines()
            if engine.id in self._healthy
            and _has_version(engine, policy, version)
            and self._missing.get((engine.id, policy, version), 0.0) < time.monotonic()
        ]

    def _choose(
        self, policy: str, version: int, affinity: str, avoid: str | None = None, choices: int = 0
    ) -> Engine | None:
        """One that is ready, if possible with places for these choices; None: none is ready."""
        ready = self._ready(policy, version)
        others = [engine for engine in ready if engine.id != avoid]
        if not others:
            return None if avoid is None else next(iter(ready), None)
        if choices and self._places is not None:
            places = self._places
            others = [engine for engine in others if places.is_free(engine.id, choices)] or others
        least_busy = min(others, key=lambda engine: self._load[engine.id])
        # Rendezvous hashing: adding or removing an engine moves only the sessions of that engine.
        home = max(others, key=lambda engine: _rank(engine.id, affinity))
        return home if self._load[home.id] <= self._load[least_busy.id] + AFFINITY_SLACK else least_busy


def _has_version(engine: Engine, policy: str, version: int) -> bool:
    return not engine.draining and (version == 0 or version in engine.versions.get(policy, frozenset()))


def _rank(engine_id: str, affinity: str) -> bytes:
    return hashlib.blake2b(f"{engine_id}\x00{affinity}".encode(), digest_size=8).digest()
