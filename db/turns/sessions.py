"""Reads sessions and turns for people: the outcome of each, and why."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome, TurnStatus
from clawloop.contracts.views import SessionView, TurnView
from clawloop.ids import SessionId, TurnId
from db.database import Database, transaction
from db.exact_json import storable
from db.tables import TurnRow

_SESSIONS = """
    SELECT s.*, counts.*
    FROM ({chosen}) s CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE kind = 'main') AS main_turns,
            count(*) FILTER (WHERE kind = 'side') AS side_turns,
            count(*) FILTER (WHERE outcome = 'waiting') AS waiting,
            count(*) FILTER (WHERE outcome IN ('sampled', 'trained')) AS sampled
        FROM turns WHERE session_id = s.id) counts
    ORDER BY s.last_turn_at DESC, s.id DESC
"""
# Newest first; the next page begins after the last session of this one.
_PAGE = """
    SELECT * FROM sessions
    WHERE (CAST(:policy AS text) IS NULL OR policy = :policy) AND (CAST(:state AS text) IS NULL OR state = :state)
      AND (CAST(:after AS uuid) IS NULL OR (last_turn_at, id) < (
          SELECT last_turn_at, id FROM sessions WHERE id = :after))
    ORDER BY last_turn_at DESC, id DESC LIMIT :limit
"""
_LIST = text(_SESSIONS.format(chosen=_PAGE))
_ONE = text(_SESSIONS.format(chosen="SELECT * FROM sessions WHERE id = :session"))

_TURNS = text("""
    SELECT t.id, t.session_id, t.parent_turn_id, t.kind, t.kind_reason, t.status, t.error, t.version, t.outcome,
        t.outcome_detail, t.started_at, t.announced_at, j.verdict, j.expected, j.hint, s.state AS sample_state,
        s.reward, count(*) FILTER (WHERE t.kind = 'main') OVER (ORDER BY t.id) AS number,
        coalesce((
            SELECT count(*) FROM votes v WHERE v.judgement_id = j.id AND v.score IS NOT NULL
            GROUP BY v.kind ORDER BY count(*) DESC LIMIT 1), 0) AS votes,
        (SELECT max(m.step) FROM step_samples m JOIN steps p ON p.policy = m.policy AND p.n = m.step
            WHERE m.sample_id = s.id AND m.dropped IS NULL AND p.state = 'committed') AS step
    FROM turns t
    LEFT JOIN LATERAL (
        SELECT * FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
        ORDER BY revision DESC, decided_at DESC LIMIT 1) j ON true
    LEFT JOIN samples s ON s.judgement_id = j.id
    WHERE t.session_id = :session ORDER BY t.id
""")


class PostgresSessionStore:
    """Implements `api.ports.SessionStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def sessions(
        self,
        connection: AsyncConnection,
        *,
        policy: str | None,
        state: SessionState | None,
        after: SessionId | None,
        limit: int,
    ) -> list[SessionView]:
        parameters = {
            "policy": None if policy is None else storable(policy),
            "state": state,
            "after": after,
            "limit": limit,
        }
        return [session_view(row) for row in await connection.execute(_LIST, parameters)]

    @transaction
    async def session(self, connection: AsyncConnection, session: SessionId) -> SessionView | None:
        row = (await connection.execute(_ONE, {"session": session})).one_or_none()
        return None if row is None else session_view(row)

    @transaction
    async def turns(self, connection: AsyncConnection, session: SessionId) -> list[TurnView]:
        return [_turn_view(row) for row in await connection.execute(_TURNS, {"session": session})]

    @transaction
    async def session_of(self, connection: AsyncConnection, turn: TurnId) -> SessionId | None:
        """The session of a turn; None if there is no such turn.

        Raises:
            StoreUnavailable
        """
        session: UUID | None = await connection.scalar(select(TurnRow.session_id).where(TurnRow.id == turn))
        return None if session is None else SessionId(session)


def _turn_view(row: Any) -> TurnView:
    return TurnView(
        id=TurnId(row.id),
        session_id=SessionId(row.session_id),
        parent_turn_id=None if row.parent_turn_id is None else TurnId(row.parent_turn_id),
        number=row.number if row.kind == TurnKind.MAIN else None,
        kind=TurnKind(row.kind),
        kind_reason=row.kind_reason,
        status=TurnStatus(row.status),
        error=row.error,
        version=row.version,
        outcome=TurnOutcome(row.outcome),
        why=row.outcome_detail,
        verdict=row.verdict,
        expected=row.expected,
        votes=row.votes,
        hint=row.hint,
        sample=None if row.sample_state is None else SampleState(row.sample_state),
        reward=row.reward,
        step=row.step,
        started_at=row.started_at,
        announced_at=row.announced_at,
    )


def session_view(row: Any) -> SessionView:
    return SessionView(
        id=SessionId(row.id),
        policy=row.policy,
        external_id=row.external_id,
        identified_by=row.identified_by,
        state=SessionState(row.state),
        main_turns=row.main_turns,
        side_turns=row.side_turns,
        waiting=row.waiting,
        sampled=row.sampled,
        created_at=row.created_at,
        last_turn_at=row.last_turn_at,
        closed_at=row.closed_at,
        closed_why=row.closed_why,
        guarantee=row.guarantee,
    )
