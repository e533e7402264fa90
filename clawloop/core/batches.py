"""Runs calls in batches: those that come while a batch runs share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawloop.core.errors import StoreUnavailable

Call = TypeVar("Call")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Call, Result]):
    call: Call
    answered: asyncio.Future[Result]


class Batches(Generic[Call, Result]):
    """A call that comes alone runs at once; under load a batch serves many.

    Args:
        run: answers each call of a batch, in their order: with its result, or with the error that its caller gets.
        most: calls of a batch.
        at_once: batches that run beside each other.
        slow_seconds: after so long a batch counts no longer towards `at_once`; None: as long as it runs.
        key: two calls with the same key are never in one batch; None: any may be.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Call]], Awaitable[Sequence[Result | Exception]]],
        *,
        most: int,
        at_once: int = 1,
        slow_seconds: float | None = None,
        key: Callable[[Call], Hashable] | None = None,
    ) -> None:
        self._run = run
        self._most = most
        self._at_once = at_once
        self._slow_seconds = slow_seconds
        self._key = key or id
        self._waiting: list[_Waiting[Call, Result]] = []
        self._starting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._alone: set[asyncio.Task[None]] = set()

    async def run(self, call: Call, *, alone: bool = False) -> Result:
        """The call's result; raises what the call raises. A caller that is cancelled leaves the batch alone.

        Args:
            alone: at once, in a batch of its own.

        Raises:
            StoreUnavailable: the batch was cancelled.
        """
        waiting = _Waiting[Call, Result](call, asyncio.get_running_loop().create_future())
        if alone:
            self._start([waiting], self._alone)
        else:
            self._waiting.append(waiting)
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_batches())
        return await waiting.answered

    async def stop(self) -> None:
        """Cancel what runs, and wait for its end."""
        tasks = {task for task in (self._starting, *self._running, *self._alone) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, batch: Sequence[_Waiting[Call, Result]], running: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(self._run_batch(batch))
        running.add(task)
        task.add_done_callback(running.discard)

    async def _start_batches(self) -> None:
        try:
            while batch := self._take():
                self._start(batch, self._running)
                if len(self._running) >= self._at_once:
                    await asyncio.wait(self._running, timeout=self._slow_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # At once: a call that comes now must see that this task will not take it.
            self._starting = None

    def _take(self) -> list[_Waiting[Call, Result]]:
        taken: dict[Hashable, _Waiting[Call, Result]] = {}
        left: list[_Waiting[Call, Result]] = []
        for waiting in self._waiting:
            if waiting.answered.done():  # its caller was cancelled
                continue
            key = self._key(waiting.call)
            if key in taken or len(taken) == self._most:
                left.append(waiting)
            else:
                taken[key] = waiting
        self._waiting = left
        return list(taken.values())

    async def _run_batch(self, batch: Sequence[_Waiting[Call, Result]]) -> None:
        answers: Sequence[Result | Exception] = [StoreUnavailable("cut off")] * len(batch)
        try:
            answers = await self._run([waiting.call for waiting in batch])
        except Exception as error:  # noqa: BLE001 - handed to the callers
            answers = [error] * len(batch)
        finally:
            for waiting, answer in zip(batch, answers, strict=True):
                if waiting.answered.done():
                    continue
                if isinstance(answer, Exception):
                    waiting.answered.set_exception(answer)
                else:
                    waiting.answered.set_result(answer)
