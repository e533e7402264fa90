"""What nobody took care of, in PostgreSQL: turns and feedback that were not announced, sessions left open."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import FeedbackGiven, SessionFacts, SessionState, TurnRecorded
from clawloop.contracts.turns import TurnKind
from clawloop.ids import FeedbackId, SessionId, TurnId
from db.database import Database
from db.tables import FeedbackRow, SessionRow, TurnRow

_FORGOTTEN = timedelta(days=1)
_FACTS = (SessionRow.id.label("session"), SessionRow.policy, SessionRow.identified_by, SessionRow.created_at)


class PostgresUpkeepStore:
    """Satisfies `activities.judging.ports.UpkeepStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def pending_turns(
        self, age: timedelta, limit: int, but: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, TurnRecorded]]:
        """Main turns older than `age` whose workflow was not told, in the order in which they were made.

        Args:
            but: none of these sessions.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_pending_turns, age, limit, but))

    async def pending_feedback(
        self, age: timedelta, limit: int, but: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, FeedbackGiven]]:
        """Feedback older than `age` whose workflow was not told, or that was told a day ago and forgotten.

        Args:
            but: none of these sessions.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_pending_feedback, age, limit, but))

    async def sessions_left_open(self, age: timedelta, limit: int) -> list[SessionFacts]:
        """Sessions without a turn for longer than `age` that nobody closed, oldest first.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_sessions_left_open, age, limit))

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None:
        """Note that the workflows of these turns were told of them; the first time counts.

        Raises:
            StoreUnavailable
        """
        told = update(TurnRow).where(TurnRow.id.in_(turn_ids), TurnRow.announced_at.is_(None))
        await self._database.run(lambda connection: connection.execute(told.values(announced_at=func.now())))

    async def mark_feedback_notified(self, feedback_ids: Sequence[FeedbackId]) -> None:
        """Note that the workflows were told of this feedback; the last time counts.

        Raises:
            StoreUnavailable
        """
        told = update(FeedbackRow).where(FeedbackRow.id.in_(feedback_ids))
        await self._database.run(lambda connection: connection.execute(told.values(announced_at=func.now())))


async def _pending_turns(
    age: timedelta, limit: int, but: Sequence[SessionId], connection: AsyncConnection
) -> list[tuple[SessionFacts, TurnRecorded]]:
    query = (
        select(TurnRow.id, TurnRow.version, TurnRow.ends_session, *_FACTS)
        .join(SessionRow, SessionRow.id == TurnRow.session_id)
        .where(TurnRow.announced_at.is_(None), TurnRow.kind == TurnKind.MAIN, TurnRow.entered_at < func.now() - age)
        .where(TurnRow.session_id.not_in(but))
        .order_by(TurnRow.id)
        .limit(limit)
    )
    return [
        (_facts(row, row.version), TurnRecorded(TurnId(row.id), row.version, row.ends_session))
        for row in await connection.execute(query)
    ]


async def _pending_feedback(
    age: timedelta, limit: int, but: Sequence[SessionId], connection: AsyncConnection
) -> list[tuple[SessionFacts, FeedbackGiven]]:
    query = (
        select(FeedbackRow.id, FeedbackRow.turn_id, TurnRow.version, *_FACTS)
        .join(TurnRow, TurnRow.id == FeedbackRow.turn_id)
        .join(SessionRow, SessionRow.id == TurnRow.session_id)
        .where(FeedbackRow.applied_at.is_(None), FeedbackRow.received_at < func.now() - age)
        .where(or_(FeedbackRow.announced_at.is_(None), FeedbackRow.announced_at < func.now() - _FORGOTTEN))
        .where(TurnRow.session_id.not_in(but))
        .order_by(FeedbackRow.id)
        .limit(limit)
    )
    return [
        (_facts(row, row.version), FeedbackGiven(FeedbackId(row.id), TurnId(row.turn_id)))
        for row in await connection.execute(query)
    ]


async def _sessions_left_open(age: timedelta, limit: int, connection: AsyncConnection) -> list[SessionFacts]:
    newest = select(func.max(TurnRow.version)).where(TurnRow.session_id == SessionRow.id).scalar_subquery()
    query = (
        select(newest.label("version"), *_FACTS)
        .where(SessionRow.state != SessionState.CLOSED, SessionRow.last_turn_at < func.now() - age)
        .order_by(SessionRow.last_turn_at)
        .limit(limit)
    )
    return [_facts(row, row.version or 0) for row in await connection.execute(query)]


def _facts(row: Any, version: int) -> SessionFacts:
    return SessionFacts(SessionId(row.session), row.policy, row.identified_by, row.created_at, version)
