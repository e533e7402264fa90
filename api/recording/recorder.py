"""Records each finished turn: in PostgreSQL, in the spool, or in memory until one of them takes it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

from pydantic import TypeAdapter

from api.recording.insert_queue import DRAIN_BATCH_TURNS, RETRY_SECONDS, InsertQueue, SpoolDrain, insert_each
from api.recording.notifier import NotificationQueue
from api.recording.spool import Spool, SpoolFull
from api.stores import TurnStore
from clawloop.core.contracts.turns import InsertedTurn, TurnRecord
from clawloop.core.errors import EncryptionKeyMissing, RecordUnusable, RequestRejected, StoreUnavailable
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.settings import WhenStorageIsFull
from clawloop.core.telemetry.metrics import GatewayMetrics
from clawloop.core.telemetry.tracing import span

# Held turns -----------------------------------------------------------------------------------------------------------
# Turns that neither PostgreSQL nor the disk takes, held in memory until one of them does.
#
# They are lost if the process ends before. Every turn tries PostgreSQL and the disk first. The disk is not tried after
# PostgreSQL but beside it, as PostgreSQL may hang for half a minute before it refuses. What both take is stored once.

log = logging.getLogger(__name__)

_RECORD = TypeAdapter(TurnRecord)
# About two hundred turns of 32,000 tokens: more would endanger the gateway itself.
HELD_BYTES = 64 * 2**20


class HeldFull(Exception):
    """The turn would exceed the limit."""


class HeldTurns:
    """Use as an async context manager: inside it the turns are tried again and again; at its end once more.

    Args:
        store: with a longer time limit than a chat's.
        drain: writes to the spool.
        notifications: gets each turn that is in PostgreSQL.
        limit_bytes: of the turns as JSON.
    """

    def __init__(
        self,
        store: TurnStore,
        drain: SpoolDrain,
        notifications: NotificationQueue,
        metrics: GatewayMetrics,
        limit_bytes: int,
    ) -> None:
        self._store = store
        self._drain = drain
        self._notifications = notifications
        self._metrics = metrics
        self._limit_bytes = limit_bytes
        self._turns: dict[TurnId, tuple[TurnRecord, int]] = {}
        self._explained: set[TurnId] = set()
        self._filled = asyncio.Event()
        # Held while a turn goes to the disk or leaves memory.
        self._placing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self._turns.values())

    @property
    def is_nearly_full(self) -> bool:
        """Half full: the other half is for replies that are under way."""
        return self.size_bytes > self._limit_bytes // 2

    async def __aenter__(self) -> HeldTurns:
        self._tasks = [asyncio.create_task(self._retry(place)) for place in (self._write_all, self._insert_all)]
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._placing:  # a write that is cut would go on in its thread, beside the next one to its file
            for task in self._tasks:
                task.cancel()
        # Before PostgreSQL, which may take longer than the time after which a gateway that stops is killed.
        await _guarded(self._write_all)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await _guarded(self._insert_all)
        for turn_id in self._turns:
            self._metrics.turns_lost.labels("stopped").inc()
            log.error("turn lost", extra={"turn_id": str(turn_id), "why": "the gateway stops, and nothing takes it"})

    def add(self, record: TurnRecord) -> None:
        """
        Raises:
            HeldFull: nothing was added.
        """
        size = len(_RECORD.dump_json(record))
        if self.size_bytes + size > self._limit_bytes:
            raise HeldFull(f"{len(self._turns)} turns are held in memory, the limit is {self._limit_bytes} bytes")
        self._turns[record.turn_id] = (record, size)
        self._metrics.held_turns.set(len(self._turns))
        self._filled.set()

    async def _retry(self, place_all: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(RETRY_SECONDS)
            await _guarded(place_all)
            if not self._turns:
                self._filled.clear()

    def _batches(self) -> Iterator[list[TurnRecord]]:
        """The turns held now in batches, oldest first."""
        held = sorted(self._turns)
        for first in range(0, len(held), DRAIN_BATCH_TURNS):
            batch = held[first : first + DRAIN_BATCH_TURNS]
            if records := [self._turns[turn_id][0] for turn_id in batch if turn_id in self._turns]:
                yield records

    async def _write_all(self) -> None:
        """Write each turn to the disk, until it takes none of a batch."""
        for records in self._batches():
            written = [await self._write(record) for record in records]
            if not any(written):
                return

    async def _write(self, record: TurnRecord) -> bool:
        """True if the turn was written, or was already gone, so that memory need not hold it."""
        async with self._placing:
            if record.turn_id in self._turns:
                try:
                    await self._drain.write(record)
                except (OSError, SpoolFull):
                    return False
                except Exception as error:  # noqa: BLE001 - a bug; the other turns go to the disk all the same
                    self._say_why(record, error)
                    return False
                self._remove(record)
                log.info("turn stored from memory", extra={"turn_id": str(record.turn_id)})
        return True

    async def _insert_all(self) -> None:
        """Insert each turn, until PostgreSQL does not answer."""
        for records in self._batches():
            results = await insert_each(self._store, records)
            for record, result in zip(records, results, strict=True):
                await self._finish(record, result)
            if all(isinstance(result, StoreUnavailable) for result in results):
                return

    async def _finish(self, record: TurnRecord, result: InsertedTurn | Exception) -> None:
        async with self._placing:
            if record.turn_id not in self._turns:
                return  # the disk was faster; the spool's drain inserts the turn again, which changes nothing
            if isinstance(result, InsertedTurn):
                self._notifications.add_turn(record, result)
                self._remove(record)
                log.info("turn stored from memory", extra={"turn_id": str(record.turn_id)})
            elif isinstance(result, RecordUnusable):
                await self._reject(record, result)
            elif not isinstance(result, StoreUnavailable):
                # A bug, or a key that may come; the turn is tried again with the others.
                self._say_why(record, result)

    async def _reject(self, record: TurnRecord, unusable: RecordUnusable) -> None:
        """Move a turn that can never be stored to `rejected/`, or count it as lost; it is not kept in memory."""
        try:
            await self._drain.write_rejected(record, unusable)
        except (OSError, SpoolFull) as error:
            self._metrics.turns_lost.labels("rejected").inc()
            why = f"{unusable}; it cannot be set aside either: {error}"
            log.error("turn lost", extra={"turn_id": str(record.turn_id), "why": why})
        self._remove(record)

    def _say_why(self, record: TurnRecord, error: Exception) -> None:
        """Log why a turn stays in memory, once: it is tried each second."""
        if record.turn_id not in self._explained:
            self._explained.add(record.turn_id)
            log.error("turn in memory not stored", extra={"turn_id": str(record.turn_id)}, exc_info=error)

    def _remove(self, record: TurnRecord) -> None:
        del self._turns[record.turn_id]
        self._explained.discard(record.turn_id)
        self._metrics.held_turns.set(len(self._turns))


async def _guarded(place_all: Callable[[], Awaitable[None]]) -> None:
    try:
        await place_all()
    except Exception:  # a bug; the next round tries again
        log.exception("round of turns in memory cut short")


# The recorder ---------------------------------------------------------------------------------------------------------
# Records each finished turn: in PostgreSQL, or in a spool on local disk where PostgreSQL does not take it in time.
#
# Where the disk takes none either, turns are held in memory, up to a limit.
#
# A chat waits until its turn is recorded, but never longer than PostgreSQL's time limit plus one write to disk. Each
# turn tries PostgreSQL first, whatever is in the spool: a turn whose parent is still on disk is stored without it, and
# gets it when the parent is stored.


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
