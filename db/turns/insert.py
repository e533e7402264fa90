"""Stores turns: each is inserted once, and reads back exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import InsertedTurn, Message, SessionEvidence, StoredTurn, TurnRecord
from clawloop.errors import RecordUnusable, StoreContended, StoreUnavailable
from clawloop.ids import ApiKeyId, TurnId
from clawloop.turns.files import take_files
from db.database import Database, transaction
from db.tables import TurnRow
from db.turns.conversation_cache import ConversationCache
from db.turns.insert_batch import insert_batch
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import read_turn
from db.turns.session_lookup import find_parent_turn, find_session


class PostgresTurnStore:
    """Implements `api.ports.TurnStore`.

    Args:
        database: its time limit bounds each transaction.
        conversations: a cache to share between stores on the same PostgreSQL; None creates one.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        (result,) = await self.insert_many([record])
        if isinstance(result, InsertedTurn):
            return result
        raise result

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        results: dict[int, InsertedTurn | Exception] = {}
        waiting: dict[int, PreparedTurn] = {}
        for place, record in enumerate(records):
            try:
                waiting[place] = PreparedTurn.checked(record, self._database.content)
            except RecordUnusable as error:
                results[place] = error
        while waiting:
            batch = _of_different_conversations(waiting)
            inserted = await self._insert_separably([waiting[place] for place in batch])
            for place, result in zip(batch, inserted, strict=True):
                if result is not None:
                    results[place] = result
                    del waiting[place]
        return [results[place] for place in range(len(records))]

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        return await self._version_of_parent(Request(key, evidence, take_files(messages)[0]))

    @transaction
    async def parent_of(self, connection: AsyncConnection, turn_id: TurnId) -> TurnId | None:
        parent = await connection.scalar(select(TurnRow.parent_turn_id).where(TurnRow.id == turn_id))
        return None if parent is None else TurnId(parent)

    @transaction
    async def mark_notified(self, connection: AsyncConnection, turn_ids: Sequence[TurnId]) -> None:
        pending = update(TurnRow).where(TurnRow.id.in_(turn_ids), TurnRow.announced_at.is_(None))
        await connection.execute(pending.values(announced_at=func.now()))

    @transaction
    async def load(self, connection: AsyncConnection, turn_id: TurnId) -> StoredTurn | None:
        """The turn as it was inserted, with references in place of files; None if there is no such turn.

        Raises:
            StoreUnavailable
        """
        return await read_turn(connection, self._conversations, turn_id)

    @transaction
    async def _version_of_parent(self, connection: AsyncConnection, request: Request) -> int | None:
        if (session := await find_session(connection, request)) is None:
            return None
        if (found := await find_parent_turn(connection, session, request)) is None:
            return None
        version: int | None = await connection.scalar(select(TurnRow.version).where(TurnRow.id == found[0]))
        return version

    async def _insert_separably(self, turns: Sequence[PreparedTurn]) -> Sequence[InsertedTurn | Exception | None]:
        """Insert turns in one transaction; each in its own if one of them fails or needs a row that is locked.

        None for a turn that has the session of another turn of `turns`; at least one result is not None.
        """
        try:
            results = await self._insert_batch(turns)
        except Exception as error:  # noqa: BLE001 - handed to the caller, beside the results of the other turns
            if len(turns) == 1 or (isinstance(error, StoreUnavailable) and not isinstance(error, StoreContended)):
                return [error] * len(turns)
            alone = await asyncio.gather(*(self._insert_separably([turn]) for turn in turns))
            return [result for (result,) in alone]
        for turn, result in zip(turns, results, strict=True):
            if result is not None and not result.duplicate and not result.erased:
                self._conversations.put(result.turn_id, turn.conversation)
        return results

    @transaction
    async def _insert_batch(
        self, connection: AsyncConnection, turns: Sequence[PreparedTurn]
    ) -> list[InsertedTurn | None]:
        return await insert_batch(connection, self._conversations, turns)


def _of_different_conversations(waiting: dict[int, PreparedTurn]) -> list[int]:
    """Places of turns of which no two can be of one conversation, as far as their records tell."""
    seen: set[bytes] = set()
    places: list[int] = []
    for place, turn in waiting.items():
        if seen.isdisjoint(turn.marks):
            places.append(place)
        seen |= turn.marks
    return places
