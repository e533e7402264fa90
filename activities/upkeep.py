"""The sweep: what was not announced is announced, in order; sessions nobody closed are woken so that they close;
adapters nobody needs are removed.

Knows nothing about how often it runs. Doing it twice does no harm: workflows drop what they know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import TypeVar

from temporalio import activity

from activities.heartbeat import heartbeating
from activities.messages import Swept
from activities.ports import Announcer, Counts, Uncounted, UpkeepStore
from activities.retention import Retention
from activities.work import WorkTelling
from clawloop.contracts import SessionFacts

log = logging.getLogger(__name__)

# Younger ones are on their way: a gateway announces within milliseconds, or not at all.
AGE = timedelta(seconds=30)
# Far beyond any idle time of the workflow itself, counted from its deadline.
LEFT_OPEN_AFTER = timedelta(minutes=10)
BATCH = 500
# Sessions told side by side; a signal takes 10 ms.
AT_ONCE = 16

Item = TypeVar("Item")


class UpkeepActivities:
    """On the queue `ledger`.

    Args:
        idle: after how long without a turn a session closes.
        age: how old what was not announced must be.
        retention: None leaves adapters where they are.
    """

    def __init__(
        self,
        store: UpkeepStore,
        announcer: Announcer,
        work: WorkTelling,
        idle: timedelta,
        age: timedelta = AGE,
        retention: Retention | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._store = store
        self._counts: Counts = counts or Uncounted()
        self._announcer = announcer
        self._work = work
        self._idle = idle
        self._age = age
        self._retention = retention

    @activity.defn
    async def sweep(self) -> Swept:
        """Announce what was missed, oldest first and each session in order; wake what was left open.

        Every part is tried. The first failure is raised when all are done, so that what failed is tried again soon.
        """
        async with heartbeating():
            failed: list[BaseException] = []
            swept = Swept(
                announced=await _tried(self._announce_turns(), failed),
                feedback=await _tried(self._announce_feedback(), failed),
                woken=await _tried(self._wake_sessions(), failed),
                work=await _tried(self._work.tell_again(), failed),
                removed=0 if self._retention is None else await _tried(self._retention.remove(), failed),
            )
            self._counts.swept(swept.announced, swept.feedback, swept.woken)
            for later in failed[1:]:
                log.warning("another part of the sweep failed", exc_info=later)
            if failed:
                raise failed[0]
            return swept

    async def _announce_turns(self) -> int:
        total = 0
        while batch := await self._store.unannounced_turns(self._age, BATCH):
            await _by_session(batch, lambda item: item[0].session_id, lambda item: self._announcer.announce_turn(*item))
            await self._store.mark_announced([turn.turn_id for _, turn in batch])
            total += len(batch)
            if len(batch) < BATCH:
                break
        return total

    async def _announce_feedback(self) -> int:
        given = await self._store.untold_feedback(self._age, BATCH)
        await _by_session(given, lambda item: item[0].session_id, lambda item: self._announcer.announce_feedback(*item))
        await self._store.mark_feedback_announced([feedback.feedback_id for _, feedback in given])
        return len(given)

    async def _wake_sessions(self) -> int:
        left: list[SessionFacts] = await self._store.sessions_left_open(self._idle + LEFT_OPEN_AFTER, BATCH)
        await _by_session(left, lambda item: item.session_id, self._announcer.wake)
        return len(left)


async def _tried(part: Awaitable[int], failed: list[BaseException]) -> int:
    """What the part returns; 0 if it fails, and then it is noted in `failed`."""
    # Whatever is wrong with one part, a bug included, must not keep the others from running.
    (result,) = await asyncio.gather(part, return_exceptions=True)
    if isinstance(result, BaseException):
        failed.append(result)
        return 0
    return result


async def _by_session(
    items: Sequence[Item], session: Callable[[Item], Hashable], tell: Callable[[Item], Awaitable[None]]
) -> None:
    """Tell each item; those of one session one after the other, in their order."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def tell_all(own: list[Item]) -> None:
        async with at_once:
            for item in own:
                await tell(item)

    order = {session(item): place for place, item in reversed(list(enumerate(items)))}
    sorted_items = sorted(items, key=lambda item: order[session(item)])  # stable: each session keeps its order
    async with asyncio.TaskGroup() as group:
        for _, own in groupby(sorted_items, key=session):
            group.create_task(tell_all(list(own)))
