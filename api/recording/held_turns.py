"""Turns that neither PostgreSQL nor the disk takes, held in memory until one of them does.

They are lost if the process ends before. Every turn tries PostgreSQL and the disk first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

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
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self._turns.values())

    @property
    def is_nearly_full(self) -> bool:
        """Half full: the other half is for replies that are under way."""
        return self.size_bytes > self._limit_bytes // 2

    async def __aenter__(self) -> HeldTurns:
        self._task = asyncio.create_task(self._retry())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._try_all()
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

    async def _retry(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(RETRY_SECONDS)
            await self._try_all()
            if not self._turns:
                self._filled.clear()

    async def _try_all(self) -> None:
        """Try each turn once, oldest first, until PostgreSQL does not answer and the disk takes none."""
        held = sorted(self._turns)
        for first in range(0, len(held), BATCH_TURNS):
            records = [self._turns[turn_id][0] for turn_id in held[first : first + BATCH_TURNS]]
            results = await self._insert(records)
            placed = [await self._place(record, result) for record, result in zip(records, results, strict=True)]
            if not any(placed) and all(isinstance(result, StoreUnavailable) for result in results):
                return

    async def _insert(self, records: Sequence[TurnRecord]) -> Sequence[InsertedTurn | Exception]:
        try:
            return await self._store.insert_many(records)
        except Exception as error:  # noqa: BLE001 - a bug; one turn must not hold up the others
            if len(records) == 1:
                return [error]
            return [result for record in records for result in await self._insert([record])]

    async def _place(self, record: TurnRecord, result: InsertedTurn | Exception) -> bool:
        """Whether memory need not hold the turn any longer."""
        if isinstance(result, RecordUnusable):
            await self._reject(record, result)
        else:
            try:
                if isinstance(result, InsertedTurn):
                    self._notifications.add_turn(record, result)
                else:
                    await self._drain.write(record)
            except (OSError, SpoolFull):
                return False
            log.info("turn stored from memory", extra={"turn_id": str(record.turn_id)})
        del self._turns[record.turn_id]
        self._metrics.held_turns.set(len(self._turns))
        return True

    async def _reject(self, record: TurnRecord, unusable: RecordUnusable) -> None:
        """Set aside a turn that can never be stored, or give it up: memory is for those that can."""
        try:
            await self._drain.write_rejected(record, unusable)
        except (OSError, SpoolFull) as error:
            self._metrics.turns_lost.labels("rejected").inc()
            why = f"{unusable}; it cannot be set aside either: {error}"
            log.error("turn lost", extra={"turn_id": str(record.turn_id), "why": why})
