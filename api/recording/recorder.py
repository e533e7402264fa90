"""Records each finished turn: in PostgreSQL, or in a spool on local disk where PostgreSQL does not take it in time.

Where the disk takes none either, turns are held in memory, up to a limit.

A chat waits until its turn is recorded, but never longer than PostgreSQL's time limit plus one write to disk. Each turn
tries PostgreSQL first, whatever is in the spool: a turn whose parent is still on disk is stored without it, and gets it
when the parent is stored.
"""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack

from api.ports import TurnStore
from api.recording.held_turns import HELD_BYTES, HeldFull, HeldTurns
from api.recording.insert_queue import InsertQueue
from api.recording.notifier import NotificationQueue
from api.recording.spool import Spool, SpoolFull
from api.recording.spool_drain import SpoolDrain
from clawloop.contracts.turns import TurnRecord
from clawloop.errors import EncryptionKeyMissing, RecordUnusable, RequestRejected, StoreUnavailable
from clawloop.ids import SessionId
from clawloop.settings import WhenStorageIsFull
from clawloop.telemetry.metrics import GatewayMetrics
from clawloop.telemetry.tracing import span

log = logging.getLogger(__name__)


class Recorder:
    """Use as an async context manager: inside it turns are recorded and the spool is drained.

    Args:
        store: with a time limit short enough for a chat that waits.
        background_store: with a longer time limit, for draining the spool.
        notifications: gets each turn that is in PostgreSQL.
        when_full: what happens to a chat whose turn would be recorded nowhere.
        held_bytes: of turns in memory, as JSON, while neither PostgreSQL nor the disk takes them.
    """

    def __init__(
        self,
        store: TurnStore,
        background_store: TurnStore,
        spool: Spool,
        metrics: GatewayMetrics,
        notifications: NotificationQueue,
        when_full: WhenStorageIsFull = WhenStorageIsFull.ANSWER,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        self._metrics = metrics
        self._notifications = notifications
        self._inserts = InsertQueue(store)
        self._drain = SpoolDrain(background_store, spool, self._inserts, notifications, metrics)
        self._held = HeldTurns(background_store, self._drain, notifications, metrics, held_bytes)
        self._when_full = when_full
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Recorder:
        await self._running.enter_async_context(self._inserts)
        await self._running.enter_async_context(self._drain)
        await self._running.enter_async_context(self._held)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    @property
    def is_nearly_full(self) -> bool:
        """Turns of further chats may be lost: PostgreSQL and the disk take none, and memory is filling up."""
        return self._held.is_nearly_full

    def require_room(self) -> None:
        """
        Raises:
            RequestRejected: 503; further turns may be lost, and the operator wants no chat that is not recorded.
        """
        if self._when_full is WhenStorageIsFull.REFUSE and self.is_nearly_full:
            raise RequestRejected(
                "turns cannot be recorded: neither PostgreSQL nor the gateway's disk takes them; try again when the"
                " operator has made room",
                status=503,
                code="recording_unavailable",
                retry_after="5",
            )

    async def record(self, record: TurnRecord) -> SessionId | None:
        """Store one turn. Never raises: a turn that cannot be stored is counted as lost and logged.

        Returns:
            Its session; None if PostgreSQL has not taken it yet.
        """
        started = time.perf_counter()
        with span("record turn", turn=str(record.turn_id), turn_kind=record.kind, status=record.status) as traced:
            place, session = await self._insert_or_spool(record)
            traced.set(place=place, session=None if session is None else str(session))
        self._metrics.record_seconds.observe(time.perf_counter() - started)
        self._metrics.turns.labels(record.kind, record.status, place).inc()
        self._metrics.tokens.inc(len(record.response_ids or ()))
        log.info(
            "turn",
            extra={
                "turn_id": str(record.turn_id),
                "kind": record.kind,
                "status": record.status,
                "version": record.version,
                "engine_id": record.engine_id,
                "place": place,
                "response_tokens": None if record.response_ids is None else len(record.response_ids),
                "seconds": round((record.finished_at - record.started_at).total_seconds(), 3),
            },
        )
        return session

    async def _insert_or_spool(self, record: TurnRecord) -> tuple[str, SessionId | None]:
        unusable: RecordUnusable | None = None
        try:
            inserted = await self._inserts.insert(record)
        except (StoreUnavailable, EncryptionKeyMissing) as error:
            log.warning("turn goes to the spool", extra={"turn_id": str(record.turn_id), "why": str(error)})
        except RecordUnusable as error:
            unusable = error
        except Exception:  # a bug in the store must cost neither the chat nor the turn
            log.exception("turn not stored", extra={"turn_id": str(record.turn_id)})
        else:
            self._notifications.add_turn(record, inserted)
            return "postgres", inserted.session_id
        return await self._write_to_spool(record, unusable), None

    async def _write_to_spool(self, record: TurnRecord, unusable: RecordUnusable | None) -> str:
        try:
            if unusable is not None:
                await self._drain.write_rejected(record, unusable)
                return "rejected"
            await self._drain.write(record)
        except SpoolFull as error:
            return self._hold(record, "spool full", error)
        except OSError as error:
            return self._hold(record, "disk", error)
        return "spool"

    def _hold(self, record: TurnRecord, why: str, error: Exception) -> str:
        try:
            self._held.add(record)
        except HeldFull:
            return self._count_lost(record, why, error)
        log.warning("turn is held in memory", extra={"turn_id": str(record.turn_id), "why": f"{why}: {error}"})
        return "memory"

    def _count_lost(self, record: TurnRecord, why: str, error: Exception) -> str:
        self._metrics.turns_lost.labels(why).inc()
        log.error("turn lost", extra={"turn_id": str(record.turn_id), "why": f"{why}: {error}"})
        return "lost"
