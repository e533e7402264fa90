"""Sessions and turns as people look at them: what became of each, and why."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome, TurnStatus
from clawloop.contracts.views import SessionView, TurnView
from clawloop.ids import SessionId, TurnId
from db.database import Database
from db.exact_json import storable

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
# The newest first; the next page begins after the last session of the one before.
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
    """Satisfies `api.ports.SessionStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def sessions(
        self, *, policy: str | None, state: SessionState | None, after: SessionId | None, limit: int
    ) -> list[SessionView]:
        """Sessions, the one with the newest turn first.

        Args:
            after: the last session of the page before; after one that nobody knows there is none.

        Raises:
            StoreUnavailable
        """
        named = None if policy is None else storable(policy)
        wanted = {"policy": named, "state": state, "after": after, "limit": limit}
        return await self._database.run(partial(_sessions, wanted))

    async def session(self, session: SessionId) -> SessionView | None:
        """
        Raises:
            StoreUnavailable
        """
        found = await self._database.run(partial(_one, session))
        return found[0] if found else None

    async def turns(self, session: SessionId) -> list[TurnView]:
        """All turns of a session in their order, each with what became of it.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_turns, session))

    async def session_of(self, turn: TurnId) -> SessionId | None:
        """
        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_session_of, turn))


async def _sessions(wanted: dict[str, Any], connection: AsyncConnection) -> list[SessionView]:
    return [_session(row) for row in await connection.execute(_LIST, wanted)]


async def _one(session: SessionId, connection: AsyncConnection) -> list[SessionView]:
    return [_session(row) for row in await connection.execute(_ONE, {"session": session})]


async def _session_of(turn: TurnId, connection: AsyncConnection) -> SessionId | None:
    found: UUID | None = await connection.scalar(text("SELECT session_id FROM turns WHERE id = :turn"), {"turn": turn})
    return None if found is None else SessionId(found)


async def _turns(session: SessionId, connection: AsyncConnection) -> list[TurnView]:
    return [
        TurnView(
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
        for row in await connection.execute(_TURNS, {"session": session})
    ]


def _session(row: Any) -> SessionView:
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
