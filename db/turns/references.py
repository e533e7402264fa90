"""Finds sessions and turns by the beginning of their id or by a client's own name."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnKind
from clawloop.ids import SessionId, TurnId
from db.content import storable
from db.database import Database, transaction
from db.tables import SessionRow, TurnRow


class PostgresReferenceStore:
    """Satisfies `clawloop.operations.reading.ReferenceStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def newest_session(self, connection: AsyncConnection) -> SessionId | None:
        newest = select(SessionRow.id).order_by(SessionRow.last_turn_at.desc(), SessionRow.id.desc()).limit(1)
        found: UUID | None = await connection.scalar(newest)
        return None if found is None else SessionId(found)

    @transaction
    async def sessions_between(
        self, connection: AsyncConnection, first: UUID, last: UUID, limit: int
    ) -> list[SessionId]:
        query = select(SessionRow.id).where(SessionRow.id.between(first, last)).order_by(SessionRow.id).limit(limit)
        return [SessionId(row.id) for row in await connection.execute(query)]

    @transaction
    async def sessions_named(self, connection: AsyncConnection, name: str, limit: int) -> list[SessionId]:
        named = select(SessionRow.id).where(SessionRow.external_id == storable(name))
        newest = named.order_by(SessionRow.last_turn_at.desc()).limit(limit)
        return [SessionId(row.id) for row in await connection.execute(newest)]

    @transaction
    async def newest_turn(self, connection: AsyncConnection) -> TurnId | None:
        newest = select(TurnRow.id).where(TurnRow.kind == TurnKind.MAIN).order_by(TurnRow.id.desc()).limit(1)
        found: UUID | None = await connection.scalar(newest)
        return None if found is None else TurnId(found)

    @transaction
    async def turns_between(self, connection: AsyncConnection, first: UUID, last: UUID, limit: int) -> list[TurnId]:
        query = select(TurnRow.id).where(TurnRow.id.between(first, last)).order_by(TurnRow.id).limit(limit)
        return [TurnId(row.id) for row in await connection.execute(query)]

    @transaction
    async def turn_numbered(self, connection: AsyncConnection, session: SessionId, number: int) -> TurnId | None:
        main = select(TurnRow.id).where(TurnRow.session_id == session, TurnRow.kind == TurnKind.MAIN)
        found: UUID | None = await connection.scalar(main.order_by(TurnRow.id).offset(number - 1).limit(1))
        return None if found is None else TurnId(found)

    @transaction
    async def session_of(self, connection: AsyncConnection, turn: TurnId) -> SessionId | None:
        session: UUID | None = await connection.scalar(select(TurnRow.session_id).where(TurnRow.id == turn))
        return None if session is None else SessionId(session)
