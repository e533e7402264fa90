"""Inserts turns into PostgreSQL in batches: as they end, and from the spool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from api.recording.notifier import NotificationQueue
from api.recording.spool import Spool
from api.stores import TurnStore
from clawloop.core.batches import Batches
from clawloop.core.contracts.turns import InsertedTurn, TurnRecord
from clawloop.core.errors import EncryptionKeyMissing, RecordUnusable, StoreUnavailable
from clawloop.core.ids import TurnId
from clawloop.core.telemetry.metrics import GatewayMetrics

# Turns as they end ----------------------------------------------------------------------------------------------------
# Inserts turns in batches: while one transaction runs, the turns that end meanwhile wait for the next one.
#
# A lone turn is inserted at once, and under load a transaction is shared by many. No turn waits longer than the time
# limit: what PostgreSQL could not take by then is the spool's. A turn past the limit may still be committed; inserting
# it again from the spool is idempotent.

log = logging.getLogger(__name__)

# For queueing and transaction together; a chat waits for it.
LIMIT_SECONDS = 0.5
# A second transaction runs while PostgreSQL computes the first one; more of them only make the batches smaller.
TRANSACTIONS = 2
# More turns hardly make a turn cheaper, and the transaction holds the rows of all their sessions.
BATCH_TURNS = 16
# After a failure PostgreSQL is not tried for this long; then one turn tries.
AWAY_SECONDS = 1.0


class InsertQueue:
    """Use as an async context manager, which ends running transactions when it exits.

    Unlike `db.group_commit` it runs two transactions at once, limits a turn's time with the wait, and knows that
    PostgreSQL is away; errors of single turns are the store's (`insert_many`).

    Args:
        store: its own time limit ends a transaction whose turns have gone to the spool.
    """

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._batches = Batches[TurnRecord, InsertedTurn](self._insert_batch, most=BATCH_TURNS, at_once=TRANSACTIONS)
        self._away_until = 0.0
        self._answered_at = 0.0

    async def __aenter__(self) -> InsertQueue:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batches.stop()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        """
        Raises:
            StoreUnavailable: not inserted within the limit, as far as is known; or PostgreSQL failed a moment ago.
            RecordUnusable: this record can never be stored.
        """
        self._require_present()
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await self._batches.run(record)
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

    async def _insert_batch(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        began = time.monotonic()
        results: list[InsertedTurn | Exception]
        try:
            results = await self._store.insert_many(records)
        except Exception as error:  # a bug in the store must not leave its callers waiting
            log.exception("batch not inserted", extra={"turns": len(records)})
            results = [error] * len(records)
        if any(not isinstance(result, StoreUnavailable) for result in results):
            self.mark_present()
        elif self._answered_at < began:
            # Nothing was answered in all that time: PostgreSQL is away, not merely busy.
            self._away_until = time.monotonic() + AWAY_SECONDS
        return results


# Turns from the spool -------------------------------------------------------------------------------------------------
# Stores the spooled turns whenever PostgreSQL answers, in batches, beside the turns that are recorded directly.
#
# Idempotent: a turn is removed from the disk after its transaction was committed, so a gateway killed in between
# inserts it again, and PostgreSQL has it once. An error of the disk concerns the one turn whose file it is.

# Half of what a chat's transaction takes, as chats go first.
DRAIN_BATCH_TURNS = 8
# A long backlog is stored in larger ones, which cost a turn 0.4 ms instead of 0.66 (measured): a PostgreSQL that is
# short of CPU must not be slower than the chats that fill the spool. One that it does not take in its time halves the
# limit, until the spool is empty.
LONGEST_BATCH_TURNS = 32
# While turns cannot be stored, and to look for turns of a gateway that died.
RETRY_SECONDS = 1.0
TAKE_OVER_SECONDS = 5.0
# Files that could not be removed are tried again, at most this many in a round: a disk that became read-only may have
# many thousands, and new turns must not wait for them.
RETRIED_FILES = 1000


async def insert_each(store: TurnStore, records: Sequence[TurnRecord]) -> Sequence[InsertedTurn | Exception]:
    """Insert turns in one batch, and after an error of the batch each turn alone, so that one bad turn does not stop
    others. Returns a result or an error for each."""
    try:
        return await store.insert_many(records)
    except Exception as error:  # noqa: BLE001 - returned
        if len(records) == 1:
            return [error]
        return [result for record in records for result in await insert_each(store, [record])]


class SpoolDrain:
    """Use as an async context manager: inside it the spool is drained.

    Args:
        store: with a longer time limit than a chat's.
        inserts: learns from the drain that PostgreSQL is back.
        notifications: gets each turn that is in PostgreSQL.
    """

    def __init__(
        self,
        store: TurnStore,
        spool: Spool,
        inserts: InsertQueue,
        notifications: NotificationQueue,
        metrics: GatewayMetrics,
    ) -> None:
        self._store = store
        self._spool = spool
        self._inserts = inserts
        self._notifications = notifications
        self._metrics = metrics
        self._filled = asyncio.Event()
        self._most_turns = LONGEST_BATCH_TURNS
        # Turns that are stored (None), or can never be (why), with files that could not be removed or set aside: they
        # are not inserted again. Each is in the spool, so there are no more of them than files.
        self._settled: dict[TurnId, str | None] = {}
        # Why turns of the spool stay there, as was logged: a hash each, for the text of an error may be long.
        self._explained: dict[TurnId, int] = {}
        # Files and folders of gateways that died which the last round could not take over, and why, as was logged.
        self._left_behind: dict[Path, str] = {}
        # In this round something else than PostgreSQL's absence kept turns where they are: a key, the disk, a bug.
        self._stuck = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> SpoolDrain:
        self._update_gauges()
        self._task = asyncio.create_task(self._drain())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def write(self, record: TurnRecord) -> None:
        """Write a turn to the spool, to be stored soon.

        Raises:
            SpoolFull, OSError: as `Spool.write`.
        """
        try:
            await asyncio.to_thread(self._spool.write, record)
        finally:
            self._update_gauges()
        self._filled.set()

    async def write_rejected(self, record: TurnRecord, error: RecordUnusable) -> None:
        """Set aside a turn that can never be stored.

        Raises:
            SpoolFull, OSError: as `Spool.write`.
        """
        self._count_rejected(record.turn_id, str(error), await asyncio.to_thread(self._spool.write_rejected, record))

    def _count_rejected(self, turn_id: TurnId, why: str, path: Path) -> None:
        self._metrics.turns_lost.labels("rejected").inc()
        log.error("turn rejected", extra={"turn_id": str(turn_id), "why": why, "path": str(path)})

    def _update_gauges(self) -> None:
        self._metrics.spool_turns.set(self._spool.turns)
        self._metrics.spool_bytes.set(self._spool.size_bytes)

    async def _drain(self) -> None:
        while True:
            self._filled.clear()
            self._stuck = False
            try:
                await self._take_over()
                await self._settle_again()
                await self._drain_once()
                await asyncio.to_thread(self._spool.restore_reserve)
            except Exception:  # e.g. the disk; the turns stay where they are
                self._stuck = True
                log.exception("spool not drained")
            self._metrics.spool_stuck.set(self._stuck)
            if self._spool.turns:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._most_turns = LONGEST_BATCH_TURNS
                await self._wait_until_filled()

    async def _take_over(self) -> None:
        failed = await asyncio.to_thread(self._spool.take_over)
        left_behind = {path: str(error) for path, error in failed.items()}
        for path, why in left_behind.items() - self._left_behind.items():
            log.error("turns of another gateway not taken over", extra={"path": str(path), "why": why})
        self._left_behind = left_behind
        self._stuck = self._stuck or bool(left_behind)

    async def _wait_until_filled(self) -> None:
        try:
            async with asyncio.timeout(TAKE_OVER_SECONDS):
                await self._filled.wait()
        except TimeoutError:
            return

    async def _drain_once(self) -> None:
        """Try each spooled turn once, oldest first, until PostgreSQL does not answer.

        Each batch has twice the turns of the one before, to the limit.
        """
        turn_ids = [turn_id for turn_id in self._spool.turn_ids() if turn_id not in self._settled]
        size, first = DRAIN_BATCH_TURNS, 0
        while batch := turn_ids[first : first + size]:
            first, size = first + size, min(2 * size, self._most_turns)
            records = await self._read(batch)
            if not records:
                continue
            results = await insert_each(self._store, records)
            await self._finish(records, results)
            if all(isinstance(result, StoreUnavailable) for result in results):
                if len(batch) > DRAIN_BATCH_TURNS:
                    self._most_turns = max(DRAIN_BATCH_TURNS, len(batch) // 2)
                return
            self._inserts.mark_present()

    async def _read(self, turn_ids: Sequence[TurnId]) -> list[TurnRecord]:
        """The readable ones of these turns; damaged ones are set aside."""
        records: list[TurnRecord] = []
        for turn_id in turn_ids:
            try:
                records.append(await asyncio.to_thread(self._spool.read, turn_id))
            except EncryptionKeyMissing as error:  # it may come; the turn stays where it is
                self._say_why("spooled turn not read", turn_id, error)
            except RecordUnusable as error:
                await self._settle(turn_id, str(error))
            except FileNotFoundError:
                log.error("spooled turn deleted by another process", extra={"turn_id": str(turn_id)})
                await self._settle(turn_id)
            except OSError as error:  # one file that the disk does not give back must not hold up the others
                self._say_why("spooled turn not read", turn_id, error)
        return records

    async def _settle(self, turn_id: TurnId, unusable: str | None = None) -> None:
        """Remove the file of a turn that is stored, or set it aside, as the turn can never be stored for this reason.

        One file that the disk does not let go must not hold up the other turns: the next rounds try it again.
        """
        self._settled.pop(turn_id, None)
        try:
            if unusable is None:
                await asyncio.to_thread(self._spool.remove, turn_id)
            else:
                self._count_rejected(turn_id, unusable, await asyncio.to_thread(self._spool.reject, turn_id))
            self._explained.pop(turn_id, None)
        except FileNotFoundError:
            pass  # the file was deleted: its next reader reports it
        except OSError as error:
            self._settled[turn_id] = unusable  # as the last one, so that each is tried again in its turn
            self._say_why("spooled turn neither removed nor set aside", turn_id, error)

    async def _settle_again(self) -> None:
        for turn_id in list(islice(self._settled, RETRIED_FILES)):
            await self._settle(turn_id, self._settled[turn_id])
        self._stuck = self._stuck or bool(self._settled)
        self._update_gauges()

    async def _finish(self, records: Sequence[TurnRecord], results: Sequence[InsertedTurn | Exception]) -> None:
        for record, result in zip(records, results, strict=True):
            if isinstance(result, InsertedTurn):
                self._notifications.add_turn(record, result)
                log.info("turn stored from the spool", extra={"turn_id": str(record.turn_id)})
                await self._settle(record.turn_id)
            elif isinstance(result, RecordUnusable):
                await self._settle(record.turn_id, str(result))
            elif not isinstance(result, StoreUnavailable):
                # A bug, or a key that may come; the turn stays on disk and is tried again with the others.
                self._say_why("spooled turn not stored", record.turn_id, result)
        self._update_gauges()

    def _say_why(self, event: str, turn_id: TurnId, error: Exception) -> None:
        """Log why a turn's file stays where it is, once for each reason: it is tried each second."""
        self._stuck = True
        reason = hash((event, repr(error)))
        if self._explained.get(turn_id) != reason:
            self._explained[turn_id] = reason
            log.error(event, extra={"turn_id": str(turn_id)}, exc_info=error)
