"""Turns that an operator may have judged again, in PostgreSQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.contracts.sessions import SessionFacts
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import SessionId, TurnId
from clawloop.judging.rejudging import RejudgeFacts
from db.database import Database, transaction
from db.tables import Feedback, Judgement, Sample, Session, Turn


class PostgresRejudgeStore:
    """Satisfies `api.ports.RejudgeStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def rejudge_facts(self, connection: AsyncConnection, turn_id: TurnId) -> RejudgeFacts | None:
        facts = await _read(connection, _query().where(Turn.id == turn_id))
        return facts[0] if facts else None

    @transaction
    async def of_session(self, connection: AsyncConnection, session: SessionId) -> list[RejudgeFacts]:
        """The session's main turns in their order."""
        main = _query().where(Turn.session_id == session, Turn.kind == TurnKind.MAIN).order_by(Turn.id)
        return await _read(connection, main)

    @transaction
    async def unjudged(self, connection: AsyncConnection, limit: int) -> list[RejudgeFacts]:
        """Turns without any valid vote, oldest first."""
        return await _read(
            connection, _query().where(Turn.outcome == TurnOutcome.UNJUDGED).order_by(Turn.id).limit(limit)
        )


def _query() -> Select[Any]:
    newest_decided = (
        select(func.max(Judgement.revision))
        .where(Judgement.turn_id == Turn.id, Judgement.decided_at.is_not(None))
        .scalar_subquery()
    )
    open_states = (SampleState.FRESH, SampleState.SUPERSEDED, SampleState.EXPIRED)
    decisive_sample = (
        select(Sample.state)
        .join(Judgement, Judgement.id == Sample.judgement_id)
        .where(Sample.turn_id == Turn.id)
        .order_by(Sample.state.not_in(open_states).desc(), Judgement.revision.desc())
        .limit(1)
        .scalar_subquery()
    )
    after, further = aliased(Turn), aliased(Turn)
    # Side turns between do not count, nor do erased turns.
    leads_on = (
        select(further.id).where(further.parent_turn_id == after.id, further.outcome != TurnOutcome.ERASED).exists()
    )
    followed = select(after.id).where(
        after.parent_turn_id == Turn.id,
        after.outcome != TurnOutcome.ERASED,
        or_(after.kind == TurnKind.MAIN, leads_on),
    )
    rated = select(Feedback.id).where(Feedback.turn_id == Turn.id)
    return select(
        Turn.id,
        Turn.kind,
        Turn.outcome,
        Turn.version,
        Turn.response.is_not(None).label("replied"),
        (func.coalesce(newest_decided, -1) + 1).label("next_revision"),
        decisive_sample.label("sample"),
        or_(followed.exists(), rated.exists()).label("answered"),
        Session.id.label("session"),
        Session.policy,
        Session.identified_by,
        Session.created_at,
    ).join(Session, Session.id == Turn.session_id)


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
            answered=row.answered,
        )
        for row in await connection.execute(query)
    ]
