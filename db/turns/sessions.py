"""Reads sessions and turns for people: the outcome of each, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import Message, TurnKind, TurnOutcome, TurnStatus
from clawloop.contracts.views import Exchange, SessionView, TurnDetail, TurnView
from clawloop.errors import ContentUnreadable, EncryptionKeyMissing
from clawloop.ids import SessionId, TurnId, short_form
from clawloop.turns.explain import Waiting, explain
from clawloop.turns.titles import title_of
from db.content import ContentCodec, content_of
from db.database import transaction
from db.exact_json import storable
from db.training.policies import require_policy
from db.turns.exchanges import read_detail, read_exchanges
from db.turns.references import PostgresReferenceStore

# One-shot requests and side turns alone are no conversations; an open session may become one.
_MAIN = "turns m WHERE m.session_id = sessions.id AND m.kind = 'main'"
_FOLDED = f"(NOT EXISTS (SELECT FROM {_MAIN}) OR (state = 'closed' AND (SELECT count(*) FROM {_MAIN}) < 2))"
SESSION_NEIGHBOURS = """
    (SELECT o.id FROM sessions o WHERE o.id < s.id ORDER BY o.id DESC LIMIT 1) AS id_before,
    (SELECT o.id FROM sessions o WHERE o.id > s.id ORDER BY o.id LIMIT 1) AS id_after
"""
"""Columns from which a session's short id follows: the neighbouring ids."""
_MATCHING = """
    FROM sessions
    WHERE (CAST(:policy AS text) IS NULL OR policy = :policy) AND (CAST(:state AS text) IS NULL OR state = :state)
"""
_SESSIONS = f"""
    SELECT s.*, counts.*, first.messages_added AS first_messages, first.id AS first_turn,
        {SESSION_NEIGHBOURS}
    FROM ({{chosen}}) s CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE kind = 'main') AS main_turns,
            count(*) FILTER (WHERE kind = 'side') AS side_turns,
            count(*) FILTER (WHERE outcome = 'waiting') AS waiting,
            count(*) FILTER (WHERE outcome IN ('sampled', 'trained')) AS sampled
        FROM turns WHERE session_id = s.id) counts
    LEFT JOIN LATERAL (
        SELECT id, messages_added FROM turns WHERE session_id = s.id ORDER BY kind = 'side', id LIMIT 1) first ON true
    ORDER BY s.last_turn_at DESC, s.id DESC
"""
# Newest first; the next page begins after the last session of this one.
_PAGE = f"""
    SELECT * {_MATCHING}
      AND (CAST(:after AS uuid) IS NULL OR (last_turn_at, id) < (
          SELECT last_turn_at, id FROM sessions WHERE id = :after))
      AND (NOT :fold OR NOT {_FOLDED})
    ORDER BY last_turn_at DESC, id DESC LIMIT :limit
"""
_LIST = text(_SESSIONS.format(chosen=_PAGE))
_COUNT = text(f"SELECT count(*) AS total, count(*) FILTER (WHERE {_FOLDED}) AS folded {_MATCHING}")
_ONE = text(_SESSIONS.format(chosen="SELECT * FROM sessions WHERE id = :session"))

_TURNS = """
    SELECT t.id, t.session_id, t.parent_turn_id, t.kind, t.kind_reason, t.status, t.error, t.version, t.outcome,
        t.outcome_detail, t.started_at, t.announced_at, t.episode_id, j.id AS judgement, j.verdict, j.expected, j.hint,
        s.state AS sample_state, s.reward, t.number, c.state AS session_state,
        coalesce((
            SELECT count(*) FROM votes v WHERE v.judgement_id = j.id AND v.score IS NOT NULL
            GROUP BY v.kind ORDER BY count(*) DESC LIMIT 1), 0) AS votes,
        (SELECT max(m.step) FROM step_samples m JOIN steps p ON p.policy = m.policy AND p.n = m.step
            WHERE m.sample_id = s.id AND m.dropped IS NULL AND p.state = 'committed') AS step,
        EXISTS (SELECT FROM turns n WHERE n.parent_turn_id = t.id AND n.kind = 'main')
            OR EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id) AS has_follow_up,
        (SELECT o.id FROM turns o WHERE o.id < t.id ORDER BY o.id DESC LIMIT 1) AS id_before,
        (SELECT o.id FROM turns o WHERE o.id > t.id ORDER BY o.id LIMIT 1) AS id_after
    FROM (
        SELECT *, count(*) FILTER (WHERE kind = 'main') OVER (ORDER BY id) AS number FROM turns
        WHERE session_id = {session}) t
    JOIN sessions c ON c.id = t.session_id
    LEFT JOIN LATERAL (
        SELECT * FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
        ORDER BY revision DESC, decided_at DESC LIMIT 1) j ON true
    LEFT JOIN samples s ON s.judgement_id = j.id
    WHERE {chosen} ORDER BY t.id DESC LIMIT :limit
"""
_OF_SESSION = text(_TURNS.format(session=":session", chosen="(CAST(:before AS uuid) IS NULL OR t.id < :before)"))
_OF_ID = text(_TURNS.format(session="(SELECT session_id FROM turns WHERE id = :turn)", chosen="t.id = :turn"))


class PostgresSessionStore(PostgresReferenceStore):
    """Satisfies `clawloop.operations.reading.SessionStore`."""

    @transaction
    async def sessions(
        self,
        connection: AsyncConnection,
        *,
        policy: str | None,
        state: SessionState | None,
        after: SessionId | None,
        limit: int,
        fold: bool = False,
    ) -> list[SessionView]:
        await require_policy(connection, policy)
        parameters = {
            "policy": None if policy is None else storable(policy),
            "state": state,
            "after": after,
            "limit": limit,
            "fold": fold,
        }
        content = content_of(connection)
        return [session_view(row, content) for row in await connection.execute(_LIST, parameters)]

    @transaction
    async def count_sessions(
        self, connection: AsyncConnection, *, policy: str | None, state: SessionState | None
    ) -> tuple[int, int]:
        parameters = {"policy": None if policy is None else storable(policy), "state": state}
        row = (await connection.execute(_COUNT, parameters)).one()
        return row.total, row.folded

    @transaction
    async def session(self, connection: AsyncConnection, session: SessionId) -> SessionView | None:
        row = (await connection.execute(_ONE, {"session": session})).one_or_none()
        return None if row is None else session_view(row, content_of(connection))

    @transaction
    async def turns(
        self,
        connection: AsyncConnection,
        session: SessionId,
        *,
        before: TurnId | None = None,
        limit: int | None = None,
    ) -> list[TurnView]:
        rows = await connection.execute(_OF_SESSION, {"session": session, "before": before, "limit": limit})
        content = content_of(connection)
        return [_turn_view(row, content) for row in reversed(rows.all())]

    @transaction
    async def turn(self, connection: AsyncConnection, turn: TurnId) -> TurnView | None:
        return await _turn(connection, turn)

    @transaction
    async def exchanges(self, connection: AsyncConnection, turns: Sequence[TurnId]) -> list[Exchange]:
        return await read_exchanges(connection, turns)

    @transaction
    async def detail(self, connection: AsyncConnection, turn: TurnId, *, tokens: bool) -> TurnDetail | None:
        view = await _turn(connection, turn)
        return None if view is None else await read_detail(connection, view, tokens=tokens)


async def _turn(connection: AsyncConnection, turn: TurnId) -> TurnView | None:
    row = (await connection.execute(_OF_ID, {"turn": turn, "limit": 1})).one_or_none()
    return None if row is None else _turn_view(row, content_of(connection))


def _turn_view(row: Any, content: ContentCodec) -> TurnView:
    outcome, status = TurnOutcome(row.outcome), TurnStatus(row.status)
    waiting = Waiting(
        notified=row.announced_at is not None,
        has_follow_up=row.has_follow_up,
        session_open=row.session_state == SessionState.OPEN,
        in_episode=row.episode_id is not None,
    )
    return TurnView(
        id=TurnId(row.id),
        short_id=short_form(row.id, row.id_before, row.id_after),
        session_id=SessionId(row.session_id),
        parent_turn_id=None if row.parent_turn_id is None else TurnId(row.parent_turn_id),
        number=row.number if row.kind == TurnKind.MAIN else None,
        kind=TurnKind(row.kind),
        kind_reason=row.kind_reason,
        status=status,
        error=content.read_text(row.error, "turns.error", row.id),
        version=row.version,
        outcome=outcome,
        why=explain(outcome, row.outcome_detail, status, waiting),
        verdict=row.verdict,
        expected=row.expected,
        votes=row.votes,
        hint=content.read_text(row.hint, "judgements.hint", row.judgement),
        sample=None if row.sample_state is None else SampleState(row.sample_state),
        reward=row.reward,
        step=row.step,
        started_at=row.started_at,
        announced_at=row.announced_at,
    )


def first_messages(row: Any, content: ContentCodec) -> Sequence[Message]:
    """First messages of a session; none if they cannot be decrypted, since one session must not hide the others."""
    if row.first_messages is None:
        return ()
    try:
        messages: list[Message] = content.read_json(row.first_messages, "turns.messages_added", row.first_turn)
    except (ContentUnreadable, EncryptionKeyMissing):
        return ()
    return messages


def session_view(row: Any, content: ContentCodec) -> SessionView:
    return SessionView(
        id=SessionId(row.id),
        short_id=short_form(row.id, row.id_before, row.id_after),
        policy=row.policy,
        title=_title(first_messages(row, content)),
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


def _title(messages: Sequence[Message]) -> str | None:
    title = title_of(messages)
    return None if title is None else storable(title)
