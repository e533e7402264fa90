"""The sweep: sends missed signals in order, wakes sessions left open so that they close, deletes unneeded adapters,
starts missing engine workflows and ends those of removed engines.

Idempotent: workflows ignore messages they already have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict
from temporalio import activity

from activities.episodes import EpisodeUpkeep
from activities.notify import ConcurrentNotifier, TrainingNotifier
from activities.serving.engines import EngineReconciler
from activities.serving.retention import Retention
from activities.training.gate import Canaries
from clawloop.core.contracts.notices import Notifier, SessionNotice
from clawloop.core.contracts.sessions import FeedbackGiven, SessionFacts, TurnRecorded
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import FeedbackId, SessionId, TurnId

if TYPE_CHECKING:
    from clawloop.core.telemetry.metrics import WorkerMetrics

log = logging.getLogger(__name__)

# Younger turns may still be on their way: a gateway signals within milliseconds, or not at all.
MIN_AGE = timedelta(seconds=30)
# Added to the workflow's own idle time; far beyond any delay of its timer.
LEFT_OPEN_AFTER = timedelta(minutes=10)
BATCH = 500
# Of turns, and of feedback, while Temporal is slow: sweeps do not overlap, so a long backlog would delay all the rest
# of the next one, such as the signal that a batch waits. The next sweep goes on with it.
NOTIFY_FOR = timedelta(seconds=30)

Item = TypeVar("Item", bound=TurnRecorded | FeedbackGiven)


class SweepStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def pending_turns(
        self, age: timedelta, limit: int, excluding: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, TurnRecorded]]:
        """Main turns older than `age` whose workflow was not notified, oldest first; none of the sessions in
        `excluding`."""

    async def pending_feedback(
        self, age: timedelta, limit: int, excluding: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, FeedbackGiven]]:
        """Feedback older than `age` whose workflow was not notified, or was notified a day ago and has not applied it;
        none of the sessions in `excluding`."""

    async def sessions_left_open(self, age: timedelta, limit: int) -> list[SessionFacts]:
        """Sessions without a turn for longer than `age` that are not closed, oldest first."""

    async def mark_notified(self, turn_ids: Sequence[TurnId], ago: timedelta) -> None:
        """Record that their workflows were notified, the first one so long ago; does nothing if Temporal may have lost
        the signals since."""

    async def mark_feedback_notified(self, feedback_ids: Sequence[FeedbackId], ago: timedelta) -> None:
        """The same for feedback."""

    async def merge_stored_bytes(self) -> int:
        """Merge the counts of what each key stores; of how many keys there were several."""


class Swept(BaseModel):
    """Counts of what a sweep found.

    Args:
        turns: those whose workflow was notified.
        feedback: pieces of feedback whose workflow was notified.
        sessions: those that were not closed, and whose workflow was woken.
        work: policies whose training workflow was notified of a waiting batch.
        removed: adapter directories that were deleted.
        engines: engine workflows that were started, or ended because their engine was removed.
        stuck: sessions whose workflow could not be notified; the next sweep retries.
        late: turns that were stored after their rollout group was settled.
        canaries: canaries that verdicts or time ended.
    """

    model_config = ConfigDict(frozen=True)

    turns: int
    feedback: int
    sessions: int
    work: int
    removed: int
    engines: int
    stuck: int
    late: int
    canaries: int


class SweepActivities:
    """Activities of the sweep; on the queue `ledger`.

    Args:
        idle: a session closes after this long without a turn.
        min_age: how old a turn or feedback must be to be swept.
        retention: None deletes no adapters.
        reconciler: None leaves engines' workflows alone.
        episodes: None leaves episodes and rollouts alone.
        canaries: None leaves canaries as they are.
    """

    def __init__(
        self,
        store: SweepStore,
        notifier: Notifier,
        training: TrainingNotifier,
        idle: timedelta,
        min_age: timedelta = MIN_AGE,
        retention: Retention | None = None,
        reconciler: EngineReconciler | None = None,
        counter: WorkerMetrics | None = None,
        episodes: EpisodeUpkeep | None = None,
        canaries: Canaries | None = None,
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._training = training
        self._idle = idle
        self._min_age = min_age
        self._retention = retention
        self._reconciler = reconciler
        self._counter = counter
        self._episodes = episodes
        self._canaries = canaries

    @activity.defn
    async def sweep(self) -> Swept:
        """Send missed signals, oldest first and each session's in order; wake sessions left open; reconcile the rest.

        What is short comes first: a backlog of turns may take minutes, and training must not wait for it.
        Each part runs even if another fails; the first error is raised at the end, so that Temporal retries soon.
        A session that cannot be notified is left to the next sweep.
        """
        async with heartbeating():
            errors: list[BaseException] = []
            await _attempt(self._store.merge_stored_bytes(), errors)
            stuck: set[SessionId] = set()
            swept = Swept(
                work=await _attempt(self._training.notify_pending(), errors),
                canaries=0 if self._canaries is None else await _attempt(self._canaries.decide(), errors),
                late=0 if self._episodes is None else await _attempt(self._episodes.sweep(), errors),
                turns=await _attempt(self._notify_turns(stuck), errors),
                feedback=await _attempt(self._notify_feedback(stuck), errors),
                sessions=await _attempt(self._wake_sessions(stuck), errors),
                removed=0 if self._retention is None else await _attempt(self._retention.remove(), errors),
                engines=0 if self._reconciler is None else await _attempt(self._reconciler.reconcile(), errors),
                stuck=len(stuck),
            )
            if self._counter is not None:
                self._counter.swept(swept.turns, swept.feedback, swept.sessions, swept.stuck)
            for error in errors[1:]:
                log.warning("another part of the sweep failed", exc_info=error)
            if errors:
                raise errors[0]
            return swept

    async def _notify_turns(self, stuck: set[SessionId]) -> int:
        return await self._notify_pending(
            lambda excluding: self._store.pending_turns(self._min_age, BATCH, excluding),
            lambda turns, ago: self._store.mark_notified([turn.turn_id for turn in turns], ago),
            stuck,
        )

    async def _notify_feedback(self, stuck: set[SessionId]) -> int:
        return await self._notify_pending(
            lambda excluding: self._store.pending_feedback(self._min_age, BATCH, excluding),
            lambda given, ago: self._store.mark_feedback_notified([each.feedback_id for each in given], ago),
            stuck,
        )

    async def _wake_sessions(self, stuck: set[SessionId]) -> int:
        notifier = ConcurrentNotifier[SessionId]("session")
        left_open = await self._store.sessions_left_open(self._idle + LEFT_OPEN_AFTER, BATCH)
        woken = await notifier.notify_each(
            left_open,
            lambda session: session.session_id,
            lambda session: self._notifier.notify(SessionNotice(session, None)),
        )
        stuck.update(notifier.failed)
        notifier.raise_if_most_failed()
        return len(woken)

    async def _notify_pending(
        self,
        read_batch: Callable[[list[SessionId]], Awaitable[Sequence[tuple[SessionFacts, Item]]]],
        mark: Callable[[list[Item], timedelta], Awaitable[None]],
        stuck: set[SessionId],
    ) -> int:
        """Notify sessions of pending items, batch after batch, all of them or for half a minute; the number of items.

        Args:
            read_batch: reads the next batch, without these sessions.
            stuck: sessions that could not be notified are added.
        """
        notifier, total = ConcurrentNotifier[SessionId]("session"), 0
        until = time.monotonic() + NOTIFY_FOR.total_seconds()
        while batch := await read_batch([*notifier.failed]):
            began = time.monotonic()
            notified = await notifier.notify_each(
                batch, lambda item: item[0].session_id, lambda item: self._notifier.notify(SessionNotice(*item))
            )
            await mark([item for _, item in notified], timedelta(seconds=time.monotonic() - began))
            stuck.update(notifier.failed)
            notifier.raise_if_most_failed()
            total += len(notified)
            if len(batch) < BATCH or time.monotonic() >= until:
                break
        return total


async def _attempt(part: Awaitable[int], errors: list[BaseException]) -> int:
    """Return the part's count; 0 if it raises, and then the error is appended to `errors`."""
    # Whatever is wrong with one part, a bug included, must not keep the others from running.
    (result,) = await asyncio.gather(part, return_exceptions=True)
    if isinstance(result, BaseException):
        errors.append(result)
        return 0
    return result
