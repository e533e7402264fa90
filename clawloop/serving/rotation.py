"""Choice of the engine for a request: a healthy one that has the version and is not draining.

A session stays on the engine whose prefix cache has it, unless that engine has more than `AFFINITY_SLACK` requests
more than the least busy one. Where chats may take only so many places of an engine, the rest stays free for judges, the
gate and probes, which ask engines without a gateway.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from clawloop.contracts.serving import Engine
from clawloop.errors import EnginesBusy, EngineUnavailable
from clawloop.serving.places import Places

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


class Gauge(Protocol):
    def inc(self) -> None: ...
    def dec(self) -> None: ...


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
