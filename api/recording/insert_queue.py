"""Inserts turns in batches: while one transaction runs, the turns that end meanwhile wait for the next one.

A lone turn is inserted at once, and under load a transaction is shared by many. No turn waits longer than the time
limit: what PostgreSQL could not take by then is the spool's. A turn past the limit may still be committed; inserting it
again from the spool is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from api.ports import TurnStore
from clawloop.contracts.turns import InsertedTurn, TurnRecord
from clawloop.errors import StoreUnavailable

log = logging.getLogger(__name__)

# For queueing and transaction together; a chat waits for it.
LIMIT_SECONDS = 0.5
# A second transaction runs while PostgreSQL computes the first one; more of them only make the batches smaller.
TRANSACTIONS = 2
# More turns hardly make a turn cheaper, and the transaction holds the rows of all their sessions.
BATCH_TURNS = 16
# After a failure PostgreSQL is not tried for this long; then one turn tries.
AWAY_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Waiting:
    record: TurnRecord
    inserted: asyncio.Future[InsertedTurn]


# Beside `db.group_commit`, which api may not import: it knows neither two transactions at once, nor a limit with the
# wait, nor that PostgreSQL is away, and its transactions and repeats alone are the store's here (`insert_many`).
class InsertQueue:
    """Use as an async context manager, which ends running transactions when it exits.

    Args:
        store: its own time limit ends a transaction whose turns have gone to the spool.
    """

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._waiting: deque[_Waiting] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._away_until = 0.0
        self._answered_at = 0.0

    async def __aenter__(self) -> InsertQueue:
        return self

    async def __aexit__(self, *_: object) -> None:
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        """
        Raises:
            StoreUnavailable: not inserted within the limit, as far as is known; or PostgreSQL failed a moment ago.
            RecordUnusable: this record can never be stored.
        """
        self._require_present()
        waiting = _Waiting(record, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._running) < TRANSACTIONS:
            task = asyncio.create_task(self._insert_batches())
            self._running.add(task)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await waiting.inserted
        except TimeoutError:
            raise StoreUnavailable(f"not stored within {LIMIT_SECONDS:g} s") from None

    def mark_present(self) -> None:
        """PostgreSQL has answered another caller: turns are inserted again."""
        self._away_until = 0.0
        self._answered_at = time.monotonic()

    def _require_present(self) -> None:
        now = time.monotonic()
        if now < self._away_until:
            raise StoreUnavailable("PostgreSQL failed a moment ago")
        if self._away_until:
            # This turn tries; the others do not wait for how that ends.
            self._away_until = now + LIMIT_SECONDS

    async def _insert_batches(self) -> None:
        try:
            await self._insert_while_turns_wait()
        finally:
            # At once: a turn that arrives now must see that this task will not insert it.
            task = asyncio.current_task()
            assert task is not None
            self._running.discard(task)

    async def _insert_while_turns_wait(self) -> None:
        while batch := self._next_batch():
            began = time.monotonic()
            try:
                results = await self._store.insert_many([waiting.record for waiting in batch])
            except Exception as error:  # a bug in the store must not leave its callers waiting
                log.exception("batch not inserted", extra={"turns": len(batch)})
                results = [error] * len(batch)
            self._note_answer(results, began)
            for waiting, result in zip(batch, results, strict=True):
                if waiting.inserted.done():  # the turn went to the spool meanwhile
                    continue
                if isinstance(result, InsertedTurn):
                    waiting.inserted.set_result(result)
                else:
                    waiting.inserted.set_exception(result)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < BATCH_TURNS:
            waiting = self._waiting.popleft()
            if not waiting.inserted.done():
                batch.append(waiting)
        return batch

    def _note_answer(self, results: list[InsertedTurn | Exception], began: float) -> None:
        if any(not isinstance(result, StoreUnavailable) for result in results):
            self.mark_present()
        elif self._answered_at < began:
            # Nothing was answered in all that time: PostgreSQL is away, not merely busy.
            self._away_until = time.monotonic() + AWAY_SECONDS
