"""A scheduler that decides by seed which of many attempts goes on, which is killed, and which is given up too early.

An attempt is one run of an activity or request in a process. It stops before and after each call of a store: killed
before, the call has no effect; killed after, its effect stands and nobody knows. Time passes only when nothing else can
happen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

from clawloop.core.errors import TransientError

Result = TypeVar("Result")

# Far more than any schedule takes; then something waits for itself.
MAX_STEPS = 20_000


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while anything is ready, and jumps to the next timer otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0

    def time(self) -> float:
        return self._virtual

    def is_idle(self) -> bool:
        """Nothing but the caller is ready."""
        return not self._ready  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._virtual = max(self._virtual, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Attempt:
    """One process that works on something; dead, it has no further effect.

    Attributes:
        note: what the attempt learned, for checks.
    """

    def __init__(self) -> None:
        self.alive = True
        self.task: asyncio.Task[Any] | None = None
        self.note: Any = None

    def kill(self) -> None:
        self.alive = False
        if self.task is not None:
            self.task.cancel()


class Schedule:
    """
    Args:
        seed: decides everything.
        crashes: how likely an attempt is killed at a point.
        timeouts: how likely an attempt that may be doubled is, at a point: it goes on beside the next one.
    """

    def __init__(self, seed: int, crashes: float, timeouts: float) -> None:
        self.chance = random.Random(seed)
        self.steps = self.killed = self.doubled = 0
        self._crashes = crashes
        self._timeouts = timeouts
        self._waiting: list[tuple[Attempt, asyncio.Future[None]]] = []
        self._running: set[asyncio.Task[Any]] = set()
        self._given_up: dict[Attempt, asyncio.Event] = {}
        self._ending = False

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that is never killed itself: a client, a workflow."""
        task = asyncio.create_task(work)
        self._running.add(task)
        return task

    async def attempts(self, work: Callable[[Attempt], Awaitable[Result]], *, may_double: bool = False) -> Result:
        """The result of the first attempt that ends; a killed one and a transient error are followed by another.

        Raises:
            PermanentError: of the attempt.
        """
        while True:
            attempt = Attempt()
            task = attempt.task = asyncio.ensure_future(work(attempt))
            given_up = asyncio.Event()
            if may_double:
                self._given_up[attempt] = given_up
            gave_up = asyncio.create_task(given_up.wait())
            await asyncio.wait({task, gave_up}, return_when=asyncio.FIRST_COMPLETED)
            gave_up.cancel()
            self._given_up.pop(attempt, None)
            if not task.done():  # it goes on, and nobody waits for it
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._running.add(task)
                continue
            if task.cancelled():
                continue
            if isinstance(task.exception(), TransientError):
                await asyncio.sleep(0.1)
                continue
            return cast(Result, task.result())

    async def point(self, attempt: Attempt) -> None:
        """Wait until this attempt's turn."""
        if not attempt.alive:
            raise asyncio.CancelledError
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt, future))
        await future
        if not attempt.alive:
            raise asyncio.CancelledError

    async def run(self) -> None:
        """Until everything that was started has ended."""
        loop = cast(VirtualTimeLoop, asyncio.get_running_loop())
        while True:
            while not loop.is_idle():
                await asyncio.sleep(0)
            for task in [task for task in self._running if task.done()]:
                self._running.discard(task)
                if not task.cancelled() and not isinstance(task.exception(), TransientError):
                    task.result()
            if not self._running:
                return
            self.steps += 1
            if self.steps >= MAX_STEPS:
                raise AssertionError(f"no end after {MAX_STEPS} steps: {self._running}")
            self._waiting = [(attempt, future) for attempt, future in self._waiting if not future.done()]
            if not self._waiting or self.chance.random() < 0.02:
                await asyncio.sleep(0.01)
                continue
            attempt, future = self._waiting.pop(self.chance.randrange(len(self._waiting)))
            if self.chance.random() < self._crashes:
                self.killed += 1
                attempt.kill()
            elif attempt in self._given_up and self.chance.random() < self._timeouts:
                self.doubled += 1
                self._given_up.pop(attempt).set()
                self._waiting.append((attempt, future))
            else:
                future.set_result(None)


class Through:
    """A store or service as one attempt sees it: a point before and after each of its calls.

    Args:
        seen: gets the name and the result of each call that the attempt saw end.
    """

    def __init__(
        self, inner: object, schedule: Schedule, attempt: Attempt, seen: Callable[[str, Any], None] | None = None
    ) -> None:
        self._inner = inner
        self._schedule = schedule
        self._attempt = attempt
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(value):
            return value

        async def call(*arguments: Any, **named: Any) -> Any:
            await self._schedule.point(self._attempt)
            result = await value(*arguments, **named)
            await self._schedule.point(self._attempt)
            if self._seen is not None:
                self._seen(name, result)
            return result

        return call
