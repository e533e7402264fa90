"""Finds what the sweep retries: turns and feedback without a signal, sessions left open."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import FeedbackGiven, SessionFacts, SessionState, TurnRecorded
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.ids import FeedbackId, SessionId, TurnId
from db.database import PostgresStore, transaction
from db.recovery import mark_feedback_notified, mark_turns_notified
from db.tables import ApiKeyRow, FeedbackRow, SessionRow, TurnRow
from db.turns.stored_bytes import merge_stored_bytes

_RENOTIFY_AFTER = timedelta(days=1)  # notified but not applied since
_FACTS = (SessionRow.id.label("session"), SessionRow.policy, SessionRow.identified_by, SessionRow.created_at)


class PostgresSweepStore(PostgresStore):
    """Implements `activities.sweep.SweepStore`."""

    @transaction
    async def pending_turns(
        self, connection: AsyncConnection, age: timedelta, limit: int, excluding: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, TurnRecorded]]:
        query = (
            select(TurnRow.id, TurnRow.version, TurnRow.ends_session, *_FACTS)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(TurnRow.announced_at.is_(None), TurnRow.kind == TurnKind.MAIN, TurnRow.episode_id.is_(None))
            .where(TurnRow.entered_at < func.now() - age, TurnRow.session_id.not_in(excluding))
            .order_by(TurnRow.id)
            .limit(limit)
        )
        return [
            (_facts(row, row.version), TurnRecorded(TurnId(row.id), row.version, row.ends_session))
            for row in await connection.execute(query)
        ]

    @transaction
    async def pending_feedback(
        self, connection: AsyncConnection, age: timedelta, limit: int, excluding: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, FeedbackGiven]]:
        due = or_(FeedbackRow.announced_at.is_(None), FeedbackRow.announced_at < func.now() - _RENOTIFY_AFTER)
        query = (
            select(FeedbackRow.id, FeedbackRow.turn_id, TurnRow.version, *_FACTS)
            .join(TurnRow, TurnRow.id == FeedbackRow.turn_id)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(FeedbackRow.applied_at.is_(None), FeedbackRow.received_at < func.now() - age, due)
            .where(TurnRow.session_id.not_in(excluding))
            .order_by(FeedbackRow.id)
            .limit(limit)
        )
        return [
            (_facts(row, row.version), FeedbackGiven(FeedbackId(row.id), TurnId(row.turn_id)))
            for row in await connection.execute(query)
        ]

    @transaction
    async def sessions_left_open(self, connection: AsyncConnection, age: timedelta, limit: int) -> list[SessionFacts]:
        newest = select(func.max(TurnRow.version)).where(TurnRow.session_id == SessionRow.id).scalar_subquery()
        query = (
            select(newest.label("version"), *_FACTS)
            .join(ApiKeyRow, and_(ApiKeyRow.id == SessionRow.api_key_id, ApiKeyRow.episode_id.is_(None)))
            .where(SessionRow.state != SessionState.CLOSED, SessionRow.last_turn_at < func.now() - age)
            .order_by(SessionRow.last_turn_at)
            .limit(limit)
        )
        return [_facts(row, row.version or 0) for row in await connection.execute(query)]

    @transaction
    async def mark_notified(self, connection: AsyncConnection, turn_ids: Sequence[TurnId], ago: timedelta) -> None:
        await mark_turns_notified(connection, turn_ids, ago)

    @transaction
    async def mark_feedback_notified(
        self, connection: AsyncConnection, feedback_ids: Sequence[FeedbackId], ago: timedelta
    ) -> None:
        await mark_feedback_notified(connection, feedback_ids, ago)

    @transaction
    async def merge_stored_bytes(self, connection: AsyncConnection) -> int:
        return await merge_stored_bytes(connection)


def _facts(row: Any, version: int) -> SessionFacts:
    return SessionFacts(SessionId(row.session), row.policy, row.identified_by, row.created_at, version)
