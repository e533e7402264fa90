"""The sweep: what was not announced is announced, in order; sessions nobody closed are woken so that they close;
adapters nobody needs are removed; each engine has its workflow, and no other has one.

Knows nothing about how often it runs. Doing it twice does no harm: workflows drop what they know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from temporalio import activity

from activities.heartbeat import heartbeating
from activities.judging.messages import Swept
from activities.judging.ports import Counts, SessionNotifier, Uncounted, UpkeepStore
from activities.notify import Notifier
from activities.serving.reconcile import EngineReconciler
from activities.serving.retention import Retention
from activities.training.notifier import TrainingNotifier
from clawloop.contracts.sessions import SessionFacts
from clawloop.ids import SessionId

log = logging.getLogger(__name__)

# Younger ones are on their way: a gateway announces within milliseconds, or not at all.
AGE = timedelta(seconds=30)
# Far beyond any idle time of the workflow itself, counted from its deadline.
LEFT_OPEN_AFTER = timedelta(minutes=10)
BATCH = 500

Item = TypeVar("Item")


class UpkeepActivities:
    """On the queue `ledger`.

    Args:
        idle: after how long without a turn a session closes.
        age: how old what was not announced must be.
        retention: None leaves adapters where they are.
        roster: None leaves engines' workflows alone.
    """

    def __init__(
        self,
        store: UpkeepStore,
        notifier: SessionNotifier,
        work: TrainingNotifier,
        idle: timedelta,
        age: timedelta = AGE,
        retention: Retention | None = None,
        reconciler: EngineReconciler | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._store = store
        self._counts: Counts = counts or Uncounted()
        self._notifier = notifier
        self._work = work
        self._idle = idle
        self._age = age
        self._retention = retention
        self._reconciler = reconciler

    @activity.defn(name="sweep")
    async def sweep(self) -> Swept:
        """Announce what was missed, oldest first and each session in order; wake what was left open.

        A session that cannot be told is left to the next sweep. Every part is tried; the first failure of one is raised
        when all are done, so that what failed is tried again soon.
        """
        async with heartbeating():
            failed: list[BaseException] = []
            stuck: set[SessionId] = set()
            swept = Swept(
                announced=await _tried(self._notify_turns(stuck), failed),
                feedback=await _tried(self._notify_feedback(stuck), failed),
                woken=await _tried(self._wake_sessions(stuck), failed),
                work=await _tried(self._work.notify_pending(), failed),
                removed=0 if self._retention is None else await _tried(self._retention.remove(), failed),
                engines=0 if self._reconciler is None else await _tried(self._reconciler.reconcile(), failed),
            )
            swept = swept.model_copy(update={"stuck": len(stuck)})
            self._counts.swept(swept.announced, swept.feedback, swept.woken, swept.stuck)
            for later in failed[1:]:
                log.warning("another part of the sweep failed", exc_info=later)
            if failed:
                raise failed[0]
            return swept

    async def _notify_turns(self, stuck: set[SessionId]) -> int:
        return await _announced(
            lambda but: self._store.pending_turns(self._age, BATCH, but),
            self._notifier.notify_turn,
            lambda turns: self._store.mark_notified([turn.turn_id for turn in turns]),
            stuck,
        )

    async def _notify_feedback(self, stuck: set[SessionId]) -> int:
        return await _announced(
            lambda but: self._store.pending_feedback(self._age, BATCH, but),
            self._notifier.notify_feedback,
            lambda given: self._store.mark_feedback_notified([feedback.feedback_id for feedback in given]),
            stuck,
        )

    async def _wake_sessions(self, stuck: set[SessionId]) -> int:
        telling = Notifier[SessionId]("session")
        left = await self._store.sessions_left_open(self._idle + LEFT_OPEN_AFTER, BATCH)
        told = await telling.tell(left, lambda item: item.session_id, self._notifier.wake)
        stuck.update(telling.stuck)
        telling.raise_if_most_failed()
        return len(told)


async def _announced(
    unheard: Callable[[list[SessionId]], Awaitable[Sequence[tuple[SessionFacts, Item]]]],
    announce: Callable[[SessionFacts, Item], Awaitable[None]],
    mark: Callable[[list[Item]], Awaitable[None]],
    stuck: set[SessionId],
) -> int:
    """Tell workflows what they have not heard, batch after batch; how much they heard.

    Args:
        unheard: the next batch, without these sessions.
        stuck: sessions that could not be told are added.
    """
    telling, total = Notifier[SessionId]("session"), 0
    while batch := await unheard([*telling.stuck]):
        told = await telling.tell(batch, lambda item: item[0].session_id, lambda item: announce(*item))
        await mark([item for _, item in told])
        stuck.update(telling.stuck)
        telling.raise_if_most_failed()
        total += len(told)
        if len(batch) < BATCH:
            break
    return total


async def _tried(part: Awaitable[int], failed: list[BaseException]) -> int:
    """What the part returns; 0 if it fails, and then it is noted in `failed`."""
    # Whatever is wrong with one part, a bug included, must not keep the others from running.
    (result,) = await asyncio.gather(part, return_exceptions=True)
    if isinstance(result, BaseException):
        failed.append(result)
        return 0
    return result
