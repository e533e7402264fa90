"""Calls of one kind that come while a transaction of that kind runs share the next one.

A call that comes alone runs at once. Under load one transaction serves many: each costs a worker more CPU than what is
done in it. Errors stay with their own call: where a shared transaction fails or waits too long for a lock, each of its
calls gets its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from enum import Enum
from typing import Generic, Literal, TypeAlias, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.batches import Batches
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
        self._batches = Batches[Call, Result | Literal[Alone.ALONE]](
            self._run, most=_CALLS, slow_seconds=_SLOW_SECONDS, key=key
        )

    async def run(self, call: Call, *, alone: bool = False) -> Result:
        """The call's result; raises what the call raises. A caller that is cancelled leaves the transaction alone.

        Args:
            alone: at once, in a transaction of its own.
        """
        answer = await self._batches.run(call, alone=alone)
        if answer is ALONE:
            answer = await self._batches.run(call, alone=True)
        assert answer is not ALONE
        return answer

    async def _run(self, calls: Sequence[Call]) -> Sequence[Answer[Result]]:
        try:
            return await self._together(calls)
        except Exception as error:
            is_away = isinstance(error, StoreUnavailable) and not isinstance(error, StoreContended | StoreTimedOut)
            if is_away or len(calls) == 1:
                raise
            return [ALONE] * len(calls)
