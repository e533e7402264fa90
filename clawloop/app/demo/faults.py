"""Kills parts of the running demo with `kill -9`, one after another, and prints each fault as a line."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

ENGINE = "vllm"
# An engine takes most of a minute to start, and the user waits for it.
FAULTS_PER_ENGINE_FAULT = 8
# From a part's return to the next fault: long enough that something is learned in between, and short enough that each
# part dies in a demo of two minutes.
QUIET_SECONDS = (2.0, 6.0)


class Parts(Protocol):
    """The parts that can be killed; satisfied by `clawloop.app.local.supervision.supervisor.Supervisor`."""

    @property
    def names(self) -> Sequence[str]: ...

    def kill(self, name: str) -> bool:
        """Kill a part's program; False if it does not run."""

    async def ready_again(self, name: str) -> None:
        """Wait until a killed part has been restarted and is ready."""


class FaultInjector:
    """
    Args:
        say: prints a line.

    Attributes:
        counts: faults so far, by part.
    """

    def __init__(
        self,
        parts: Parts,
        say: Callable[[str], None],
        seed: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._parts = parts
        self._say = say
        self._random = random.Random(f"faults {seed}")
        self._pause = pause
        self._others: list[str] = []
        self.counts: Counter[str] = Counter()

    @asynccontextmanager
    async def injecting(self) -> AsyncIterator[None]:
        """Inject faults inside the block."""
        task = asyncio.create_task(self._inject())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()  # raises the error that ended it

    async def _inject(self) -> None:
        while True:
            await self._pause(self._random.uniform(*QUIET_SECONDS))
            name = self._choose()
            if not self._parts.kill(name):
                continue  # it has just ended by itself
            self.counts[name] += 1
            number, killed_at = self.counts.total(), time.monotonic()
            self._say(f"fault {number}: kill -9 of {name}")
            await self._parts.ready_again(name)
            self._say(f"fault {number}: {name} is back after {time.monotonic() - killed_at:.1f} s")

    def _choose(self) -> str:
        """The engine each eighth time; else each other part once, then all again in another order."""
        if ENGINE in self._parts.names and (self.counts.total() + 1) % FAULTS_PER_ENGINE_FAULT == 0:
            return ENGINE
        if not self._others:
            self._others = [name for name in self._parts.names if name != ENGINE]
            self._random.shuffle(self._others)
        return self._others.pop()
