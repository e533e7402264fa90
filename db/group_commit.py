"""Calls of one kind that come while a transaction of that kind runs share the next one.

A call that comes alone runs at once. Under load one transaction serves many: each costs a worker more CPU than what is
done in it. Errors stay with their own call: where a shared transaction fails or waits too long for a lock, each of its
calls gets its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeAlias, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.errors import StoreContended, StoreTimedOut, StoreUnavailable
from db.database import raw_connection

Call = TypeVar("Call")
Result = TypeVar("Result")

# More calls hardly make one cheaper, and the transaction holds the rows of all of them.
_CALLS = 32
# A transaction that waits for a lock must not keep those behind it waiting, which may need other rows.
_SLOW_SECONDS = 0.1
# Far longer than transactions hold a lock; what holds one longer must not use up the time of calls that need others.
_LIMIT_LOCK_WAIT = "SELECT set_config('lock_timeout', '1s', true)"


class Alone(Enum):
    """The answer to a call that needs a transaction of its own."""

    ALONE = "alone"


ALONE = Alone.ALONE
Answer: TypeAlias = Result | Exception | Literal[Alone.ALONE]


async def limit_lock_wait(connection: AsyncConnection, calls: Sequence[object]) -> None:
    """Have a shared transaction fail soon, where a call alone may wait for its lock as long as its database lets it."""
    if len(calls) > 1:
        await (await raw_connection(connection)).execute(_LIMIT_LOCK_WAIT)


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Call, Result]):
    call: Call
    answered: asyncio.Future[Result]


class GroupCommit(Generic[Call, Result]):
    """
    Args:
        together: runs calls in one transaction; answers in their order.
            Where there are several, it may answer ALONE: the call is run again in a transaction of its own.
        key: two calls with the same one are not run together.
    """

    def __init__(
        self,
        together: Callable[[Sequence[Call]], Awaitable[Sequence[Answer[Result]]]],
        key: Callable[[Call], Hashable],
    ) -> None:
        self._together = together
        self._key = key
        self._waiting: list[_Waiting[Call, Result]] = []
        self._starting = False
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, call: Call, *, alone: bool = False) -> Result:
        """The call's result; raises what the call raises. A caller that is cancelled leaves the transaction alone.

        Args:
            alone: at once, in a transaction of its own.
        """
        waiting = _Waiting[Call, Result](call, asyncio.get_running_loop().create_future())
        if alone:
            self._start(self._run_group([waiting]))
            return await waiting.answered
        self._waiting.append(waiting)
        if not self._starting:
            self._starting = True
            self._start(self._run_groups())
        return await waiting.answered

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run_groups(self) -> None:
        try:
            while group := self._take():
                await asyncio.wait({self._start(self._run_group(group))}, timeout=_SLOW_SECONDS)
        finally:
            # At once: a call that comes now must see that this task will not take it.
            self._starting = False

    def _take(self) -> list[_Waiting[Call, Result]]:
        taken: dict[Hashable, _Waiting[Call, Result]] = {}
        left: list[_Waiting[Call, Result]] = []
        for waiting in self._waiting:
            if waiting.answered.done():  # its caller was cancelled
                continue
            key = self._key(waiting.call)
            if key in taken or len(taken) == _CALLS:
                left.append(waiting)
            else:
                taken[key] = waiting
        self._waiting = left
        return list(taken.values())

    async def _run_group(self, group: Sequence[_Waiting[Call, Result]]) -> None:
        try:
            answers = await self._together([waiting.call for waiting in group])
        except asyncio.CancelledError:
            for waiting in group:
                waiting.answered.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - handed to the callers
            is_away = isinstance(error, StoreUnavailable) and not isinstance(error, StoreContended | StoreTimedOut)
            answers = [error if is_away or len(group) == 1 else ALONE] * len(group)
        for waiting, answer in zip(group, answers, strict=True):
            if answer is ALONE:
                self._start(self._run_group([waiting]))
            else:
                _answer(waiting, answer)


def _answer(waiting: _Waiting[Call, Result], answer: Result | Exception) -> None:
    if waiting.answered.done():
        return
    if isinstance(answer, Exception):
        waiting.answered.set_exception(answer)
    else:
        waiting.answered.set_result(answer)
