"""How many requests of one key, and of all keys, may wait for their grammar at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cachetools import LRUCache

from clawloop.errors import RequestRejected
from clawloop.ids import ApiKeyId
from clawloop.serving.places import Places
from clawloop.settings import ChatBounds

# What an engine takes for the largest grammar that the bounds let through, on one core.
COMPILE_SECONDS = 10.0
# Three of them: then the client should know that it is too fast.
WAIT_SECONDS = 30.0
# One semaphore is 100 bytes; keys that sent nothing for longest are forgotten.
_KEYS = 10_000


class GrammarSlots:
    """Holds back requests whose grammars the engine has not compiled yet.

    An engine compiles grammars on a few threads, for all keys and judges. It goes on although a client disconnects.

    Args:
        slots: requests of one key at once.
        together: those of all keys, on one engine; keys get them in turn.
        wait_seconds: how long a request is held for a free slot.
        compile_seconds: after this a slot is free whatever became of its request.
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
        self._by_key: LRUCache[ApiKeyId, asyncio.BoundedSemaphore] = LRUCache(_KEYS)
        self._on_engines = Places(together)

    @classmethod
    def of(cls, bounds: ChatBounds, wait_seconds: float = WAIT_SECONDS) -> GrammarSlots:
        return cls(bounds.structured_requests, bounds.structured_requests_together, wait_seconds)

    @asynccontextmanager
    async def slot(self, key: ApiKeyId, engine: str) -> AsyncIterator[None]:
        """Hold one slot of a key and an engine, from before the engine is asked until its first token, if compiling
        takes that long.

        Raises:
            RequestRejected: 429, none became free in time.
        """
        free = self._by_key.setdefault(key, asyncio.BoundedSemaphore(self._slots))
        owner = str(key)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await free.acquire()
                try:
                    if self._on_engines.is_free(engine, 1):
                        self._on_engines.take(engine, owner, 1)
                    else:
                        await self._on_engines.wait([engine], owner, 1, lambda other: other == engine, None)
                except BaseException:
                    free.release()
                    raise
        except TimeoutError:
            raise RequestRejected(
                f"{self._slots} requests of this key, or {self._on_engines.limit} of all keys, wait for their grammar "
                "(`response_format`, `structured_outputs`, forced or strict tools). Send fewer at once, or try again "
                f"in {self._wait_seconds:.0f} s.",
                status=429,
                code="too_many_structured_requests",
                retry_after=f"{self._wait_seconds:.0f}",
            ) from None

        def release() -> None:
            free.release()
            self._on_engines.give_back(engine, owner, 1)

        compiled = asyncio.get_running_loop().call_later(self._compile_seconds, release)
        try:
            yield
        except asyncio.CancelledError:
            raise  # the client left, and the engine compiles on
        except BaseException:
            _release_early(compiled, release)
            raise
        else:
            _release_early(compiled, release)


def _release_early(compiled: asyncio.TimerHandle, release: Callable[[], None]) -> None:
    """Release a slot unless its time is over: then the timer has released it, or is about to."""
    if compiled.when() > asyncio.get_running_loop().time():
        compiled.cancel()
        release()
