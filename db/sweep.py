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
from db.tables import Feedback, Session, Turn

_FORGOTTEN = timedelta(days=1)
_FACTS = (Session.id.label("session"), Session.policy, Session.identified_by, Session.created_at)


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
        told = update(Turn).where(Turn.id.in_(turn_ids), Turn.announced_at.is_(None))
        await self._database.run(lambda connection: connection.execute(told.values(announced_at=func.now())))

    async def mark_feedback_notified(self, feedback_ids: Sequence[FeedbackId]) -> None:
        """Note that the workflows were told of this feedback; the last time counts.

        Raises:
            StoreUnavailable
        """
        told = update(Feedback).where(Feedback.id.in_(feedback_ids))
        await self._database.run(lambda connection: connection.execute(told.values(announced_at=func.now())))


async def _pending_turns(
    age: timedelta, limit: int, but: Sequence[SessionId], connection: AsyncConnection
) -> list[tuple[SessionFacts, TurnRecorded]]:
    query = (
        select(Turn.id, Turn.version, Turn.ends_session, *_FACTS)
        .join(Session, Session.id == Turn.session_id)
        .where(Turn.announced_at.is_(None), Turn.kind == TurnKind.MAIN, Turn.entered_at < func.now() - age)
        .where(Turn.session_id.not_in(but))
        .order_by(Turn.id)
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
        select(Feedback.id, Feedback.turn_id, Turn.version, *_FACTS)
        .join(Turn, Turn.id == Feedback.turn_id)
        .join(Session, Session.id == Turn.session_id)
        .where(Feedback.applied_at.is_(None), Feedback.received_at < func.now() - age)
        .where(or_(Feedback.announced_at.is_(None), Feedback.announced_at < func.now() - _FORGOTTEN))
        .where(Turn.session_id.not_in(but))
        .order_by(Feedback.id)
        .limit(limit)
    )
    return [
        (_facts(row, row.version), FeedbackGiven(FeedbackId(row.id), TurnId(row.turn_id)))
        for row in await connection.execute(query)
    ]


async def _sessions_left_open(age: timedelta, limit: int, connection: AsyncConnection) -> list[SessionFacts]:
    newest = select(func.max(Turn.version)).where(Turn.session_id == Session.id).scalar_subquery()
    query = (
        select(newest.label("version"), *_FACTS)
        .where(Session.state != SessionState.CLOSED, Session.last_turn_at < func.now() - age)
        .order_by(Session.last_turn_at)
        .limit(limit)
    )
    return [_facts(row, row.version or 0) for row in await connection.execute(query)]


def _facts(row: Any, version: int) -> SessionFacts:
    return SessionFacts(SessionId(row.session), row.policy, row.identified_by, row.created_at, version)
