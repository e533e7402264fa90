"""Keeping each finished turn: in Postgres, or on local disk until Postgres is back.

Knows nothing about where turns came from. A chat waits for its turn to be safe, but never longer than Postgres'
limit plus one write to the disk; while Postgres is away it does not wait for it at all.
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

# After a failure Postgres is left alone this long; turns go straight to the spool.
BREAKER_SECONDS = 1.0


class Recorder:
    """Use as an async context manager: inside it the spool is emptied whenever Postgres answers.

    Args:
        store: Postgres, with the short limit that a chat can wait for.
        patient_store: Postgres, for emptying the spool: nobody waits for that.
        spool: local disk.
        metrics: told where each turn went.
        announcements: given each turn that is in Postgres.
    """

    def __init__(
        self,
        store: TurnStore,
        patient_store: TurnStore,
        spool: Spool,
        metrics: GatewayMetrics,
        notifications: NotificationQueue,
    ) -> None:
        self._store = store
        self._patient_store = patient_store
        self._spool = spool
        self._metrics = metrics
        self._announcements = notifications
        self._breaker = AsyncCircuitBreakerFactory(
            default_threshold=1, default_ttl=BREAKER_SECONDS, exclude=[RecordUnusable]
        )
        self._spooled = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Recorder:
        self._count_spool()
        self._spooled.set()
        self._drain = asyncio.create_task(self._keep_draining())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.wait([self._drain])

    async def record(self, record: TurnRecord) -> None:
        """Make one turn safe. Never raises: a turn that fits nowhere is counted and said so."""
        began = time.perf_counter()
        place = await self._place(record)
        self._metrics.record_seconds.observe(time.perf_counter() - began)
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

    async def _place(self, record: TurnRecord) -> str:
        # A turn must not overtake its parents on disk.
        if not self._spool.turns:
            try:
                await self._insert(self._store, record)
            except StoreUnavailable as error:
                log.warning("Postgres away", extra={"turn_id": str(record.turn_id), "why": str(error)})
            except RecordUnusable as error:
                return await self._put(record, unusable=error)
            except Exception:  # whatever it is, neither the chat nor the turn may suffer from it
                log.exception("turn not entered", extra={"turn_id": str(record.turn_id)})
            else:
                return "postgres"
        return await self._put(record)

    async def _insert(self, store: TurnStore, record: TurnRecord) -> InsertedTurn:
        try:
            async with await self._breaker.get_breaker("postgres"):
                inserted = await store.insert(record)
        except OpenedState:
            raise StoreUnavailable("it failed a moment ago") from None
        self._announcements.add(record, inserted)
        return inserted

    async def _put(self, record: TurnRecord, unusable: RecordUnusable | None = None) -> str:
        try:
            await asyncio.to_thread(self._spool.put, record)
            if unusable is not None:
                path = await asyncio.to_thread(self._spool.set_aside, record.turn_id)
                self._reject(record.turn_id, unusable, str(path))
                return "rejected"
        except SpoolFull as error:
            return self._lose(record, "spool full", error)
        except OSError as error:
            return self._lose(record, "disk", error)
        finally:
            self._count_spool()
        self._spooled.set()
        return "spool"

    def _lose(self, record: TurnRecord, why: str, error: Exception) -> str:
        self._metrics.turns_lost.labels(why).inc()
        log.error("turn lost", extra={"turn_id": str(record.turn_id), "why": f"{why}: {error}"})
        return "lost"

    def _reject(self, turn_id: TurnId, error: RecordUnusable, path: str) -> None:
        self._metrics.turns_lost.labels("rejected").inc()
        log.error("turn set aside", extra={"turn_id": str(turn_id), "why": str(error), "path": path})

    async def _keep_draining(self) -> None:
        while True:
            await self._spooled.wait()
            self._spooled.clear()
            for turn_id in self._spool.waiting():
                try:
                    await self._drain_one(turn_id)
                except StoreUnavailable:
                    break
                except Exception:  # one bad file must not keep all later turns on disk
                    log.exception("spooled turn not entered", extra={"turn_id": str(turn_id)})
                self._count_spool()
            if self._spool.turns:
                self._spooled.set()
                await asyncio.sleep(BREAKER_SECONDS)

    async def _drain_one(self, turn_id: TurnId) -> None:
        try:
            record = await asyncio.to_thread(self._spool.read, turn_id)
            await self._insert(self._patient_store, record)
        except RecordUnusable as error:
            path = await asyncio.to_thread(self._spool.set_aside, turn_id)
            self._reject(turn_id, error, str(path))
        else:
            await asyncio.to_thread(self._spool.remove, turn_id)
            log.info("turn entered from the spool", extra={"turn_id": str(turn_id)})

    def _count_spool(self) -> None:
        self._metrics.spool_turns.set(self._spool.turns)
        self._metrics.spool_bytes.set(self._spool.size_bytes)
