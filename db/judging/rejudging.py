"""Turns that an operator may have judged again, in PostgreSQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.contracts.sessions import SessionFacts
from clawloop.contracts.training import UNTAKEN, SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import SessionId, TurnId
from clawloop.judging.rejudging import RejudgeFacts
from db.database import Database, transaction
from db.tables import FeedbackRow, JudgementRow, SampleRow, SessionRow, TurnRow


class PostgresRejudgeStore:
    """Satisfies `clawloop.operations.ports.RejudgeStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def rejudge_facts(self, connection: AsyncConnection, turn_id: TurnId) -> RejudgeFacts | None:
        facts = await _read(connection, _query().where(TurnRow.id == turn_id))
        return facts[0] if facts else None

    @transaction
    async def of_session(self, connection: AsyncConnection, session: SessionId) -> list[RejudgeFacts]:
        """The session's main turns in their order."""
        main = _query().where(TurnRow.session_id == session, TurnRow.kind == TurnKind.MAIN).order_by(TurnRow.id)
        return await _read(connection, main)

    @transaction
    async def unjudged(self, connection: AsyncConnection, limit: int) -> list[RejudgeFacts]:
        """Turns without any valid vote, oldest first."""
        return await _read(
            connection, _query().where(TurnRow.outcome == TurnOutcome.UNJUDGED).order_by(TurnRow.id).limit(limit)
        )


def _query() -> Select[Any]:
    newest_decided = (
        select(func.max(JudgementRow.revision))
        .where(JudgementRow.turn_id == TurnRow.id, JudgementRow.decided_at.is_not(None))
        .scalar_subquery()
    )
    open_states = (*UNTAKEN, SampleState.EXPIRED)
    decisive_sample = (
        select(SampleRow.state)
        .join(JudgementRow, JudgementRow.id == SampleRow.judgement_id)
        .where(SampleRow.turn_id == TurnRow.id)
        .order_by(SampleRow.state.not_in(open_states).desc(), JudgementRow.revision.desc())
        .limit(1)
        .scalar_subquery()
    )
    after, further = aliased(TurnRow), aliased(TurnRow)
    # Side turns between do not count, nor do erased turns.
    leads_on = (
        select(further.id).where(further.parent_turn_id == after.id, further.outcome != TurnOutcome.ERASED).exists()
    )
    followed = select(after.id).where(
        after.parent_turn_id == TurnRow.id,
        after.outcome != TurnOutcome.ERASED,
        or_(after.kind == TurnKind.MAIN, leads_on),
    )
    rated = select(FeedbackRow.id).where(FeedbackRow.turn_id == TurnRow.id)
    return select(
        TurnRow.id,
        TurnRow.kind,
        TurnRow.outcome,
        TurnRow.version,
        TurnRow.response.is_not(None).label("replied"),
        (func.coalesce(newest_decided, -1) + 1).label("next_revision"),
        decisive_sample.label("sample"),
        or_(followed.exists(), rated.exists()).label("has_follow_up"),
        SessionRow.id.label("session"),
        SessionRow.policy,
        SessionRow.identified_by,
        SessionRow.created_at,
    ).join(SessionRow, and_(SessionRow.id == TurnRow.session_id, TurnRow.episode_id.is_(None)))


async def _read(connection: AsyncConnection, query: Select[Any]) -> list[RejudgeFacts]:
    return [
        RejudgeFacts(
            turn_id=TurnId(row.id),
            session=SessionFacts(SessionId(row.session), row.policy, row.identified_by, row.created_at, row.version),
            kind=TurnKind(row.kind),
            outcome=TurnOutcome(row.outcome),
            replied=row.replied,
            sample=None if row.sample is None else SampleState(row.sample),
            next_revision=row.next_revision,
            has_follow_up=row.has_follow_up,
        )
        for row in await connection.execute(query)
    ]
