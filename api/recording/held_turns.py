"""Turns that neither PostgreSQL nor the disk takes, held in memory until one of them does.

They are lost if the process ends before. Every turn tries PostgreSQL and the disk first. The disk is not tried after
PostgreSQL but beside it, as PostgreSQL may hang for half a minute before it refuses. What both take is stored once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from pydantic import TypeAdapter

from api.ports import TurnStore
from api.recording.notifier import NotificationQueue
from api.recording.spool import SpoolFull
from api.recording.spool_drain import BATCH_TURNS, RETRY_SECONDS, SpoolDrain
from clawloop.contracts.turns import InsertedTurn, TurnRecord
from clawloop.errors import RecordUnusable, StoreUnavailable
from clawloop.ids import TurnId
from clawloop.telemetry.metrics import GatewayMetrics

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
        for first in range(0, len(held), BATCH_TURNS):
            batch = held[first : first + BATCH_TURNS]
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
            results = await self._insert(records)
            for record, result in zip(records, results, strict=True):
                await self._finish(record, result)
            if all(isinstance(result, StoreUnavailable) for result in results):
                return

    async def _insert(self, records: Sequence[TurnRecord]) -> Sequence[InsertedTurn | Exception]:
        try:
            return await self._store.insert_many(records)
        except Exception as error:  # noqa: BLE001 - a bug; one turn must not hold up the others
            if len(records) == 1:
                return [error]
            return [result for record in records for result in await self._insert([record])]

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
        """Set aside a turn that can never be stored, or give it up: memory is for those that can."""
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
