"""Telling sessions' workflows about stored turns and feedback, behind the chat's back.

Knows nothing about Temporal. Best effort: a turn that is not announced here keeps `announced_at` NULL in Postgres,
and the sweep announces it. So nothing here waits for long, keeps much, or raises to the chat.
"""

from __future__ import annotations

import asyncio
import logging
import time

from api.ports import FeedbackStore, SessionNotifier, TurnStore
from clawloop.contracts.sessions import FeedbackGiven, SessionFacts, StoredFeedback, TurnRecorded
from clawloop.contracts.turns import InsertedTurn, TurnKind, TurnRecord
from clawloop.errors import SignalFailed, StoreUnavailable
from clawloop.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# A signal takes about 10 ms: eight at once are 800 turns a second, far more than one gateway makes.
LANES = 8
# Per lane; a turn of which only ids are kept takes some hundred bytes.
LANE_LIMIT = 250
# After a failure the workflows are left alone this long; turns of that time are the sweep's.
QUIET_SECONDS = 5.0
# At shutdown: what is not told by then is the sweep's.
FINISH_SECONDS = 1.0

SessionMessage = tuple[SessionFacts, TurnRecorded | FeedbackGiven]


class NotificationQueue:
    """Use as an async context manager: inside it turns are announced; turns of one session in their order.

    Args:
        announcer: None announces nothing: all is left to the sweep.
        turns, feedback: note what was announced; nobody waits for them.
    """

    def __init__(
        self, notifier: SessionNotifier | None, turns: TurnStore, feedback: FeedbackStore, metrics: GatewayMetrics
    ) -> None:
        self._notifier = notifier
        self._turns = turns
        self._feedback = feedback
        self._metrics = metrics
        self._lanes: list[asyncio.Queue[SessionMessage]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._quiet_until = 0.0

    async def __aenter__(self) -> NotificationQueue:
        if self._notifier is not None:
            self._lanes = [asyncio.Queue(LANE_LIMIT) for _ in range(LANES)]
            self._tasks = [asyncio.create_task(self._send_batches(lane, self._notifier)) for lane in self._lanes]
        return self

    async def __aexit__(self, *_: object) -> None:
        joining = [asyncio.create_task(lane.join()) for lane in self._lanes]
        if joining:
            await asyncio.wait(joining, timeout=FINISH_SECONDS)
        for task in (*joining, *self._tasks):
            task.cancel()
        await asyncio.gather(*joining, *self._tasks, return_exceptions=True)

    def add(self, record: TurnRecord, inserted: InsertedTurn) -> None:
        """Announce a stored turn soon, if it is one that may be judged."""
        if record.kind is not TurnKind.MAIN or inserted.erased:
            return
        facts = SessionFacts(
            session_id=inserted.session_id,
            policy=record.policy,
            identified_by=record.evidence.source,
            since=record.started_at,
            version=record.version,
        )
        self._put(facts, TurnRecorded(record.turn_id, record.version, record.ends_session))

    def add_feedback(self, stored: StoredFeedback) -> None:
        """Announce stored feedback soon."""
        self._put(stored.session, stored.given)

    def _put(self, session: SessionFacts, message: TurnRecorded | FeedbackGiven) -> None:
        if not self._lanes or time.monotonic() < self._quiet_until:
            self._leave(1)
            return
        lane = self._lanes[session.session_id.int % len(self._lanes)]
        try:
            lane.put_nowait((session, message))
        except asyncio.QueueFull:
            self._leave(1)

    async def _send_batches(self, lane: asyncio.Queue[SessionMessage], notifier: SessionNotifier) -> None:
        while True:
            batch = [await lane.get()]
            while not lane.empty():
                batch.append(lane.get_nowait())
            try:
                await self._note(await self._tell(batch, notifier))
            finally:
                for _ in batch:
                    lane.task_done()

    async def _tell(self, batch: list[SessionMessage], notifier: SessionNotifier) -> list[TurnRecorded | FeedbackGiven]:
        told: list[TurnRecorded | FeedbackGiven] = []
        for session, message in batch:
            if time.monotonic() < self._quiet_until:
                break
            try:
                if isinstance(message, FeedbackGiven):
                    await notifier.notify_feedback(session, message)
                else:
                    await notifier.notify_turn(session, message)
            except SignalFailed as error:
                self._quiet_until = time.monotonic() + QUIET_SECONDS
                log.warning("turns are left to the sweep", extra={"why": str(error)})
                break
            told.append(message)
        self._leave(len(batch) - len(told))
        return told

    async def _note(self, told: list[TurnRecorded | FeedbackGiven]) -> None:
        turns = [message.turn_id for message in told if isinstance(message, TurnRecorded)]
        try:
            if turns:
                await self._turns.mark_notified(turns)
            for message in told:
                if isinstance(message, FeedbackGiven):
                    await self._feedback.mark_feedback_notified(message.feedback_id)
        except StoreUnavailable as error:
            # Told twice is told once: the sweep will tell them again.
            log.warning("announced, but not noted", extra={"messages": len(told), "why": str(error)})
        self._metrics.notifications.labels("told").inc(len(told))

    def _leave(self, count: int) -> None:
        if count:
            self._metrics.notifications.labels("left to the sweep").inc(count)
