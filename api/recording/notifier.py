"""Notifies session workflows of stored turns and feedback, in the background.

Best effort: a turn whose notification fails keeps `announced_at` NULL in PostgreSQL, and the sweep notifies its
workflow. So waits are short, queues are bounded, and nothing raises to the chat.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from api.stores import FeedbackStore, TurnStore
from clawloop.core.contracts.notices import Notifier, SessionNotice
from clawloop.core.contracts.sessions import (
    FeedbackGiven,
    RepeatableRequest,
    SessionFacts,
    StoredFeedback,
    TurnRecorded,
)
from clawloop.core.contracts.turns import InsertedTurn, TurnKind, TurnRecord
from clawloop.core.errors import AlreadyAnswered, SignalFailed, StoreUnavailable
from clawloop.core.ids import ApiKeyId
from clawloop.core.telemetry.metrics import GatewayMetrics
from clawloop.core.telemetry.tracing import continued, current_context
from clawloop.core.turns.reactions import Reaction, newest_reaction

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = logging.getLogger(__name__)

# A signal takes about 10 ms: eight in parallel are 800 turns a second, far more than one gateway makes.
QUEUES = 8
# Per queue; a message holds ids only, some hundred bytes.
QUEUE_LIMIT = 250
# After a failure no signal is sent for this long; turns of that time are left to the sweep.
PAUSE_SECONDS = 5.0
# When a reaction is stored at last: PostgreSQL may be away, or the reply that it is about still on the disk.
RATING_PAUSES = (1.0, 5.0, 30.0, 120.0, 600.0)
# Reactions that wait at the same time; each holds ids only.
RATINGS_LIMIT = 1000
# At shutdown: what is not sent by then is left to the sweep.
DRAIN_SECONDS = 1.0

# The last one is where the message belongs in a trace.
SessionMessage = tuple[SessionFacts, TurnRecorded | FeedbackGiven, "Context | None"]


class NotificationQueue:
    """Use as an async context manager: inside it queued messages are sent, those of one session in order.

    Args:
        notifier: None sends nothing: all messages are left to the sweep.
        turns, feedback: where sent messages are marked as notified.
        feedback: also takes the reactions that clients pass on.
    """

    def __init__(
        self, notifier: Notifier | None, turns: TurnStore, feedback: FeedbackStore, metrics: GatewayMetrics
    ) -> None:
        self._notifier = notifier
        self._turns = turns
        self._feedback = feedback
        self._metrics = metrics
        self._queues: list[asyncio.Queue[SessionMessage]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._paused_until = 0.0
        self._reactions: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> NotificationQueue:
        if self._notifier is not None:
            self._queues = [asyncio.Queue(QUEUE_LIMIT) for _ in range(QUEUES)]
            self._tasks = [asyncio.create_task(self._send_batches(queue, self._notifier)) for queue in self._queues]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reactions:
            await asyncio.wait(self._reactions, timeout=DRAIN_SECONDS)
        joining = [asyncio.create_task(queue.join()) for queue in self._queues]
        if joining:
            await asyncio.wait(joining, timeout=DRAIN_SECONDS)
        for task in (*joining, *self._tasks, *self._reactions):
            task.cancel()
        await asyncio.gather(*joining, *self._tasks, *self._reactions, return_exceptions=True)

    def add_turn(self, record: TurnRecord, inserted: InsertedTurn) -> None:
        """Queue a notification of a stored turn, if it is one that may be judged, and rate by a reaction in it.

        Never raises: the turn is stored, and neither its chat nor the turns that are stored with it wait for this.
        """
        try:
            self._add_turn(record, inserted)
        except Exception:  # a bug: the sweep sends what is not queued
            log.exception("notification not queued", extra={"turn_id": str(record.turn_id)})

    def _add_turn(self, record: TurnRecord, inserted: InsertedTurn) -> None:
        self._rate_by_reaction(record, inserted)
        if record.kind is not TurnKind.MAIN or inserted.erased or record.episode_id is not None:
            return
        facts = SessionFacts(
            session_id=inserted.session_id,
            policy=record.policy,
            identified_by=record.evidence.source,
            since=record.started_at,
            version=record.version,
        )
        recorded = TurnRecorded(record.turn_id, record.version, record.ends_session, inserted.opens_session)
        self._enqueue(facts, recorded)

    def add_feedback(self, stored: StoredFeedback) -> None:
        """Queue a notification of stored feedback."""
        self._enqueue(stored.session, stored.given)

    def _rate_by_reaction(self, record: TurnRecord, inserted: InsertedTurn) -> None:
        if inserted.erased or record.episode_id is not None:
            return
        if inserted.parent_turn_id is None and not any(message["role"] == "assistant" for message in record.messages):
            return
        if (reaction := newest_reaction(record.messages)) is None:
            return
        if len(self._reactions) >= RATINGS_LIMIT:
            log.warning("a reaction was not stored", extra={"turn_id": str(record.turn_id), "why": "many others wait"})
            return
        task = asyncio.create_task(self._rate(record.api_key_id, inserted, reaction))
        self._reactions.add(task)
        task.add_done_callback(self._reactions.discard)

    async def _rate(self, key: ApiKeyId, inserted: InsertedTurn, reaction: Reaction) -> None:
        """Rate the reply before the request; once, however often the client sends the request."""
        told = hashlib.sha256(f"reaction {inserted.session_id} {reaction.event}".encode()).digest()
        why = ""
        for pause in (*RATING_PAUSES, None):
            try:
                rated = inserted.parent_turn_id or await self._turns.parent_of(inserted.turn_id)
                if rated is not None:
                    request = RepeatableRequest(told, told)
                    stored = await self._feedback.give(key, rated, reaction.score, None, request)
                    if stored is not None:
                        self.add_feedback(stored)
                    return
                why = "the reply that it is about is not stored"
            except AlreadyAnswered:
                return
            except StoreUnavailable as error:
                why = str(error)
            if pause is not None:
                await asyncio.sleep(pause)
        log.warning("a reaction was not stored", extra={"turn_id": str(inserted.turn_id), "why": why})

    def _enqueue(self, session: SessionFacts, message: TurnRecorded | FeedbackGiven) -> None:
        if not self._queues or time.monotonic() < self._paused_until:
            self._count_unsent(1)
            return
        queue = self._queues[session.session_id.int % len(self._queues)]
        try:
            queue.put_nowait((session, message, current_context()))
        except asyncio.QueueFull:
            self._count_unsent(1)

    async def _send_batches(self, queue: asyncio.Queue[SessionMessage], notifier: Notifier) -> None:
        while True:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            try:
                began = time.monotonic()
                sent = await self._send(batch, notifier)
                await self._mark_notified(sent, timedelta(seconds=time.monotonic() - began))
            except Exception:  # a bug: the sweep sends what is not marked; the messages that follow are sent as ever
                log.exception("notifications left to the sweep", extra={"messages": len(batch)})
            finally:
                for _ in batch:
                    queue.task_done()

    async def _send(self, batch: list[SessionMessage], notifier: Notifier) -> list[TurnRecorded | FeedbackGiven]:
        sent: list[TurnRecorded | FeedbackGiven] = []
        try:
            for session, message, context in batch:
                if time.monotonic() < self._paused_until:
                    break
                with continued(context):
                    await notifier.notify(SessionNotice(session, message))
                sent.append(message)
        except SignalFailed as error:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            log.warning("signal failed: notifications are left to the sweep", extra={"why": str(error)})
        finally:
            self._count_unsent(len(batch) - len(sent))
        return sent

    async def _mark_notified(self, sent: list[TurnRecorded | FeedbackGiven], ago: timedelta) -> None:
        turns = [message.turn_id for message in sent if isinstance(message, TurnRecorded)]
        try:
            if turns:
                await self._turns.mark_notified(turns, ago)
            for message in sent:
                if isinstance(message, FeedbackGiven):
                    await self._feedback.mark_feedback_notified(message.feedback_id, ago)
        except StoreUnavailable as error:
            # The sweep sends these again, which is harmless: signals are idempotent.
            log.warning("notifications sent, but not marked as sent", extra={"messages": len(sent), "why": str(error)})
        self._metrics.notifications.labels("told").inc(len(sent))

    def _count_unsent(self, count: int) -> None:
        if count:
            self._metrics.notifications.labels("left to the sweep").inc(count)
