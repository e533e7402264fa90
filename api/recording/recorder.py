"""Records each finished turn: in PostgreSQL, or in a spool on local disk until PostgreSQL is back.

A chat waits until its turn is recorded, but never longer than PostgreSQL's time limit plus one write to disk. While
PostgreSQL is away the turn goes to the spool at once.
"""

from __future__ import annotations

import asyncio
import logging
import time

from purgatory import AsyncCircuitBreakerFactory
from purgatory.domain.model import OpenedState

from api.ports import TurnStore
from api.recording.notifier import NotificationQueue
from api.recording.spool import Spool, SpoolFull
from clawloop.contracts.turns import InsertedTurn, TurnRecord
from clawloop.errors import RecordUnusable, StoreUnavailable
from clawloop.ids import TurnId
from clawloop.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# After a failure PostgreSQL is not tried for this long; turns go straight to the spool.
BREAKER_SECONDS = 1.0


class Recorder:
    """Use as an async context manager: inside it the spool is drained whenever PostgreSQL answers.

    Args:
        store: with a time limit short enough for a chat that waits.
        background_store: with a longer time limit, for draining the spool.
        notifications: gets each turn that is in PostgreSQL.
    """

    def __init__(
        self,
        store: TurnStore,
        background_store: TurnStore,
        spool: Spool,
        metrics: GatewayMetrics,
        notifications: NotificationQueue,
    ) -> None:
        self._store = store
        self._background_store = background_store
        self._spool = spool
        self._metrics = metrics
        self._notifications = notifications
        self._breaker = AsyncCircuitBreakerFactory(
            default_threshold=1, default_ttl=BREAKER_SECONDS, exclude=[RecordUnusable]
        )
        self._spool_changed = asyncio.Event()
        self._drain_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Recorder:
        self._update_spool_gauges()
        self._spool_changed.set()
        self._drain_task = asyncio.create_task(self._drain_spool())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._drain_task is not None:
            self._drain_task.cancel()
            await asyncio.wait([self._drain_task])

    async def record(self, record: TurnRecord) -> None:
        """Store one turn. Never raises: a turn that cannot be stored is counted as lost and logged."""
        started = time.perf_counter()
        place = await self._store_or_spool(record)
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

    async def _store_or_spool(self, record: TurnRecord) -> str:
        # A turn must not be stored before its parents in the spool.
        if not self._spool.turns:
            try:
                await self._insert(self._store, record)
            except StoreUnavailable as error:
                log.warning("PostgreSQL away", extra={"turn_id": str(record.turn_id), "why": str(error)})
            except RecordUnusable as error:
                return await self._write_to_spool(record, unusable=error)
            except Exception:  # a bug in the store must cost neither the chat nor the turn
                log.exception("turn not stored", extra={"turn_id": str(record.turn_id)})
            else:
                return "postgres"
        return await self._write_to_spool(record)

    async def _insert(self, store: TurnStore, record: TurnRecord) -> InsertedTurn:
        try:
            async with await self._breaker.get_breaker("postgres"):
                inserted = await store.insert(record)
        except OpenedState:
            raise StoreUnavailable("PostgreSQL failed a moment ago") from None
        self._notifications.add_turn(record, inserted)
        return inserted

    async def _write_to_spool(self, record: TurnRecord, unusable: RecordUnusable | None = None) -> str:
        try:
            await asyncio.to_thread(self._spool.write, record)
            if unusable is not None:
                path = await asyncio.to_thread(self._spool.reject, record.turn_id)
                self._count_rejected(record.turn_id, unusable, str(path))
                return "rejected"
        except SpoolFull as error:
            return self._count_lost(record, "spool full", error)
        except OSError as error:
            return self._count_lost(record, "disk", error)
        finally:
            self._update_spool_gauges()
        self._spool_changed.set()
        return "spool"

    def _count_lost(self, record: TurnRecord, why: str, error: Exception) -> str:
        self._metrics.turns_lost.labels(why).inc()
        log.error("turn lost", extra={"turn_id": str(record.turn_id), "why": f"{why}: {error}"})
        return "lost"

    def _count_rejected(self, turn_id: TurnId, error: RecordUnusable, path: str) -> None:
        self._metrics.turns_lost.labels("rejected").inc()
        log.error("turn rejected", extra={"turn_id": str(turn_id), "why": str(error), "path": path})

    async def _drain_spool(self) -> None:
        while True:
            await self._spool_changed.wait()
            self._spool_changed.clear()
            for turn_id in self._spool.turn_ids():
                try:
                    await self._drain_turn(turn_id)
                except StoreUnavailable:
                    break
                except Exception:  # one bad file must not hold up all later turns
                    log.exception("spooled turn not stored", extra={"turn_id": str(turn_id)})
                self._update_spool_gauges()
            if self._spool.turns:
                self._spool_changed.set()
                await asyncio.sleep(BREAKER_SECONDS)

    async def _drain_turn(self, turn_id: TurnId) -> None:
        try:
            record = await asyncio.to_thread(self._spool.read, turn_id)
            await self._insert(self._background_store, record)
        except RecordUnusable as error:
            path = await asyncio.to_thread(self._spool.reject, turn_id)
            self._count_rejected(turn_id, error, str(path))
        else:
            await asyncio.to_thread(self._spool.remove, turn_id)
            log.info("turn stored from the spool", extra={"turn_id": str(turn_id)})

    def _update_spool_gauges(self) -> None:
        self._metrics.spool_turns.set(self._spool.turns)
        self._metrics.spool_bytes.set(self._spool.size_bytes)
