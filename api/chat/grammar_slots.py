"""Limits on the requests of one key, and of all keys, that wait for their grammar at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cachetools import LRUCache

from clawloop.core.errors import RequestRejected
from clawloop.core.ids import ApiKeyId
from clawloop.core.settings import ChatBounds
from clawloop.serving.rotation import Places

# Time in which an engine compiles the largest grammar that the bounds permit, on one core.
COMPILE_SECONDS = 10.0
# The time of three such grammars; after it the client should know that it is too fast.
WAIT_SECONDS = 30.0
# One semaphore is 100 bytes; keys that sent nothing for longest are forgotten.
_KEYS = 10_000


class GrammarSlots:
    """Holds back requests whose grammars the engine has not compiled yet.

    An engine compiles grammars on a few threads, for all keys and judges. It goes on although a client disconnects.
    A request takes its key's slot before its place on an engine, so that one key's grammars keep few places.

    Args:
        slots: requests of one key at once.
        together: those of all keys, on one engine; keys get them in turn.
        wait_seconds: how long a request is held for a free slot.
        compile_seconds: after this a slot is free in any case.
    """

    def __init__(
        self,
        slots: int,
        together: int,
        wait_seconds: float = WAIT_SECONDS,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._slots = slots
        self._wait_seconds = wait_seconds
        self._compile_seconds = compile_seconds
        self._by_key: LRUCache[ApiKeyId, _KeySlots] = LRUCache(_KEYS)
        self._on_engines = Places(together)

    @classmethod
    def of(cls, bounds: ChatBounds, wait_seconds: float = WAIT_SECONDS) -> GrammarSlots:
        return cls(bounds.structured_requests, bounds.structured_requests_together, wait_seconds)

    @asynccontextmanager
    async def slot(self, key: ApiKeyId) -> AsyncIterator[GrammarSlot]:
        """Hold one slot of a key, from before the request waits for an engine until its first token, if compiling takes
        that long. While those before it wait for an engine, the time that it is held for does not run.

        Raises:
            RequestRejected: 429, none became free in time.
        """
        of_key = self._by_key.setdefault(key, _KeySlots(self._slots))
        slot = GrammarSlot(of_key, self._on_engines, str(key), self._wait_seconds, self._compile_seconds)
        await slot.take()
        try:
            yield slot
        except asyncio.CancelledError:
            slot.leave()
            raise
        except BaseException:
            slot.end()
            raise
        else:
            slot.end()


class _KeySlots:
    """The slots of one key, and the patience of those who wait for one."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = asyncio.BoundedSemaphore(slots)
        self._without_engine = 0
        # Seconds that each of those who wait has left while its time does not run.
        self._waiting: dict[asyncio.Timeout, float] = {}

    async def take(self, wait_seconds: float) -> None:
        """
        Raises:
            TimeoutError
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            self._waiting[limit] = wait_seconds
            if not self._without_engine:
                limit.reschedule(loop.time() + wait_seconds)
            try:
                await self._free.acquire()
            finally:
                del self._waiting[limit]
        self.lose_engine()

    def give_back(self) -> None:
        self._free.release()

    def lose_engine(self) -> None:
        """One that has a slot waits for an engine now."""
        self._without_engine += 1
        if self._without_engine == 1:
            now = asyncio.get_running_loop().time()
            for limit in self._waiting:
                if (when := limit.when()) is not None and not limit.expired():
                    self._waiting[limit] = when - now
                    limit.reschedule(None)

    def get_engine(self) -> None:
        """Note that one more request has an engine, or has stopped waiting for one."""
        self._without_engine -= 1
        if self._without_engine == 0:
            now = asyncio.get_running_loop().time()
            for limit, left in self._waiting.items():
                if limit.when() is None:
                    limit.reschedule(now + left)


class GrammarSlot:
    """One request's slot of its key, and of the engine that it is sent to."""

    def __init__(
        self, of_key: _KeySlots, on_engines: Places, owner: str, wait_seconds: float, compile_seconds: float
    ) -> None:
        self._of_key = of_key
        self._on_engines = on_engines
        self._owner = owner
        self._wait_seconds = wait_seconds
        self._compile_seconds = compile_seconds
        self._held = False
        self._engine: str | None = None
        self._compiled: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Take the key's slot.

        Raises:
            RequestRejected: 429, none became free in time.
        """
        try:
            await self._of_key.take(self._wait_seconds)
        except TimeoutError:
            raise self._refusal() from None
        self._held = True

    async def on(self, engine: str) -> None:
        """Take a slot of the engine that the request is about to be sent to, instead of one that broke off.

        Raises:
            RequestRejected: 429, none became free in time.
        """
        if self._engine is not None:
            self._leave_engine()
        if not self._held:  # that engine took longer than a grammar takes
            await self.take()
        try:
            if self._on_engines.is_free(engine, 1):
                self._on_engines.take(engine, self._owner, 1)
            else:
                await self._on_engines.wait([engine], self._owner, 1, lambda other: other == engine, self._wait_seconds)
        except TimeoutError:
            raise self._refusal() from None
        self._engine = engine
        self._of_key.get_engine()
        self._compiled = asyncio.get_running_loop().call_later(self._compile_seconds, self._release)

    def end(self) -> None:
        """The grammar is compiled, or the request failed."""
        self._release()

    def leave(self) -> None:
        """The client left: the engine, if it has the request, compiles on."""
        if self._compiled is None:
            self._release()

    def _release(self) -> None:
        if not self._held:
            return
        self._held = False
        if self._compiled is not None:
            self._compiled.cancel()
        if self._engine is None:
            self._of_key.get_engine()
        else:
            self._on_engines.give_back(self._engine, self._owner, 1)
        self._of_key.give_back()

    def _leave_engine(self) -> None:
        assert self._compiled is not None
        assert self._engine is not None
        self._compiled.cancel()
        if self._held:
            self._on_engines.give_back(self._engine, self._owner, 1)
            self._of_key.lose_engine()
        self._engine = self._compiled = None

    def _refusal(self) -> RequestRejected:
        return RequestRejected(
            f"{self._of_key.slots} requests of this key, or {self._on_engines.limit} of all keys, wait for their "
            "grammar (`response_format`, `structured_outputs`, forced or strict tools). Send fewer at once, or try "
            f"again in {self._wait_seconds:.0f} s.",
            status=429,
            code="too_many_structured_requests",
            retry_after=f"{self._wait_seconds:.0f}",
        )
