"""Reads sessions and turns for people, by what was said and decided in them: the outcome of each, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import TextClause, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import MatchedBy, Message, TurnKind, TurnOutcome, TurnStatus
from clawloop.core.contracts.views import (
    Exchange,
    LessonShown,
    SessionFilter,
    SessionView,
    TaughtHint,
    TurnDetail,
    TurnView,
)
from clawloop.core.encryption.key_file import SETTING
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, StateConflict
from clawloop.core.ids import ApiKeyId, EpisodeId, SessionId, TurnId, short_form
from clawloop.core.turns.explain import Waiting, explain
from clawloop.core.turns.titles import title_of
from db.content import ContentCodec, content_of, exact_json, storable, token_count
from db.database import PostgresStore, transaction
from db.encryption.columns import opened
from db.judging.tables import HINT_SOURCE, newest_judgement
from db.tables import SessionRow, TurnRow
from db.training.policies import require_policy
from db.turns.exchanges import read_detail, read_exchanges
from db.turns.read import LESSON_TEXTS, shown_lessons

# One-shot requests and side turns alone are no conversations; an open session may become one.
_MAIN = "turns m WHERE m.session_id = c.id AND m.kind = 'main'"
_FOLDED = f"(NOT EXISTS (SELECT FROM {_MAIN}) OR (c.state = 'closed' AND (SELECT count(*) FROM {_MAIN}) < 2))"
_MATCHING = """
    FROM sessions c
    WHERE (CAST(:policy AS text) IS NULL OR c.policy = :policy) AND (CAST(:state AS text) IS NULL OR c.state = :state)
"""
_TURN_FILTERS = {
    "kind": "t.kind = :kind",
    "outcome": "t.outcome = :outcome",
    "version": "t.version = :version",
    # Stored as JSON text, so that NUL and lone surrogates, which no operator on JSON takes, are found or passed over.
    # `position` takes half as long as ILIKE, and every turn is read: no index finds parts of words without an extension
    # that PostgreSQL comes without.
    "text": """(position(lower(CAST(:text AS text)) IN lower(t.messages_added::text)) > 0
        OR position(lower(CAST(:text AS text)) IN lower(t.response::text)) > 0)""",
    # One query for all verdicts: a look-up for each turn takes seconds where no session of 10,000 fits.
    "verdict": """t.id IN (
        SELECT turn_id FROM (
            SELECT DISTINCT ON (turn_id) turn_id, verdict FROM judgements WHERE decided_at IS NOT NULL
            ORDER BY turn_id, revision DESC, decided_at DESC) newest
        WHERE verdict = :verdict)""",
    "judged": """:judged = EXISTS (
        SELECT FROM judgements j WHERE j.turn_id = t.id AND j.decided_at IS NOT NULL AND j.verdict IS NOT NULL)""",
}
# Newest first, so that a common filter ends early; the next page begins after the last session of this one.
_PAGE = f"""
    SELECT c.* {_MATCHING}
      AND (CAST(:after AS uuid) IS NULL OR (c.last_turn_at, c.id) < (
          SELECT last_turn_at, id FROM sessions WHERE id = :after))
      AND {{having}}
    ORDER BY c.last_turn_at DESC, c.id DESC LIMIT :limit
"""
_SESSIONS = f"""
    SELECT s.*, k.episode_id, counts.*, first.messages_added AS first_messages, first.id AS first_turn,
        (SELECT o.id FROM sessions o WHERE o.id < s.id ORDER BY o.id DESC LIMIT 1) AS id_before,
        (SELECT o.id FROM sessions o WHERE o.id > s.id ORDER BY o.id LIMIT 1) AS id_after
    FROM ({{chosen}}) s JOIN api_keys k ON k.id = s.api_key_id
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE t.kind = 'main') AS main_turns,
            count(*) FILTER (WHERE t.kind = 'side') AS side_turns,
            count(*) FILTER (WHERE t.outcome = 'waiting') AS waiting,
            count(*) FILTER (WHERE t.outcome IN ('sampled', 'trained')) AS sampled,
            count(*) FILTER (WHERE j.verdict = 1) AS praised, count(*) FILTER (WHERE j.verdict = -1) AS blamed,
            coalesce(min(t.version), 0) AS first_version, coalesce(max(t.version), 0) AS last_version
        FROM turns t LEFT JOIN LATERAL {newest_judgement("t.id")} j ON true
        WHERE t.session_id = s.id AND t.kind <> 'practice') counts
    LEFT JOIN LATERAL (
        SELECT t.id, t.messages_added FROM turns t
        WHERE t.session_id = s.id AND t.kind <> 'practice' AND t.outcome <> 'erased'
        ORDER BY t.kind, t.id LIMIT 1) first ON true
    ORDER BY s.last_turn_at DESC, s.id DESC
"""
_COUNT = text(f"SELECT count(*) AS total, count(*) FILTER (WHERE {_FOLDED}) AS folded {_MATCHING}")
_ONE = text(_SESSIONS.format(chosen="SELECT * FROM sessions WHERE id = :session"))

# A practised reply was sent to no client, so no conversation shows it.
_SHOWN = "kind <> 'practice'"
# The turns are chosen by the index alone; what stands beside them is read for those.
_TURNS = f"""
    WITH chosen AS (
        SELECT id, number FROM (
            SELECT id, kind, count(*) FILTER (WHERE kind = 'main') OVER (ORDER BY id) AS number FROM turns
            WHERE session_id = {{session}}) numbered
        {{chosen}})
    SELECT t.id, t.session_id, t.parent_turn_id, t.matched_by, t.kind, t.kind_reason, t.status, t.error, t.version,
        t.outcome,
        t.outcome_detail, t.started_at, t.announced_at, t.episode_id, j.id AS judgement, j.verdict, j.expected, j.hint,
        {HINT_SOURCE},
        s.state AS sample_state, s.reward, chosen.number, c.state AS session_state,
        {token_count("t.response_ids")} AS tokens, t.lessons, {LESSON_TEXTS} AS lesson_texts,
        EXISTS (SELECT FROM judgements o WHERE o.turn_id = t.id AND o.decided_at IS NULL) AS being_judged,
        coalesce((
            SELECT count(*) FROM votes v WHERE v.judgement_id = j.id AND v.score IS NOT NULL
            GROUP BY v.kind ORDER BY count(*) DESC LIMIT 1), 0) AS votes,
        (SELECT max(m.step) FROM step_samples m JOIN steps p ON p.policy = m.policy AND p.n = m.step
            WHERE m.sample_id = s.id AND m.dropped IS NULL AND p.state = 'committed') AS step,
        (SELECT m.taught FROM step_samples m WHERE m.sample_id = s.id AND m.taught IS NOT NULL
            ORDER BY m.step DESC LIMIT 1) AS taught,
        EXISTS (SELECT FROM turns n WHERE n.parent_turn_id = t.id AND n.kind = 'main')
            OR EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id) AS has_follow_up,
        (SELECT o.id FROM turns o WHERE o.id < t.id ORDER BY o.id DESC LIMIT 1) AS id_before,
        (SELECT o.id FROM turns o WHERE o.id > t.id ORDER BY o.id LIMIT 1) AS id_after
    FROM chosen JOIN turns t ON t.id = chosen.id
    JOIN sessions c ON c.id = t.session_id
    LEFT JOIN LATERAL {newest_judgement("t.id")} j ON true
    LEFT JOIN samples s ON s.judgement_id = j.id
    ORDER BY t.id
"""
_BEFORE = f"WHERE {_SHOWN} AND (CAST(:before AS uuid) IS NULL OR id < :before) ORDER BY id DESC LIMIT :limit"
_NEWEST = text(_TURNS.format(session=":session", chosen=_BEFORE))
_FROM = text(_TURNS.format(session=":session", chosen=f"WHERE {_SHOWN} ORDER BY id OFFSET :first LIMIT :limit"))
_OF_ID = text(_TURNS.format(session="(SELECT session_id FROM turns WHERE id = :turn)", chosen="WHERE id = :turn"))


class PostgresSessionStore(PostgresStore):
    """Satisfies `clawloop.operations.reading.SessionStore`."""

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

    @transaction
    async def sessions(
        self, connection: AsyncConnection, wanted: SessionFilter, *, after: SessionId | None, limit: int
    ) -> list[SessionView]:
        await require_policy(connection, wanted.policy)
        content = content_of(connection)
        filters = {name: value for name in _TURN_FILTERS if (value := getattr(wanted, name)) is not None}
        having = " AND ".join(_TURN_FILTERS[name] for name in filters)
        if filters:
            having = f"EXISTS (SELECT FROM turns t WHERE t.session_id = c.id AND t.kind <> 'practice' AND {having})"
        else:
            having = f"NOT {_FOLDED}" if wanted.fold else "true"
        parameters: dict[str, Any] = filters | {
            "policy": None if wanted.policy is None else storable(wanted.policy),
            "state": wanted.state,
            "after": after,
            "limit": limit,
        }
        if wanted.text is not None:
            if content.is_on:
                raise StateConflict(
                    f"Text cannot be searched: content is encrypted, as {SETTING} says. Leave `text` out, or use"
                    " `clawloop export` and search the file.",
                    code="search_is_off",
                    field="text",
                )
            parameters["text"] = exact_json(wanted.text)[1:-1]  # as it is inside the JSON text it is stored in
        query = text(_SESSIONS.format(chosen=_PAGE.format(having=having)))
        return [_session_view(row, content) for row in await connection.execute(query, parameters)]

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
        return None if row is None else _session_view(row, content_of(connection))

    @transaction
    async def turns(
        self,
        connection: AsyncConnection,
        session: SessionId,
        *,
        before: TurnId | None = None,
        limit: int | None = None,
    ) -> list[TurnView]:
        return await _read_turns(connection, _NEWEST, {"session": session, "before": before, "limit": limit})

    @transaction
    async def turns_from(
        self, connection: AsyncConnection, session: SessionId, first: int, limit: int
    ) -> list[TurnView]:
        return await _read_turns(connection, _FROM, {"session": session, "first": first, "limit": limit})

    @transaction
    async def position(self, connection: AsyncConnection, session: SessionId, turn: TurnId) -> int:
        shown = (TurnRow.session_id == session, TurnRow.kind != TurnKind.PRACTICE)
        before = select(func.count()).where(*shown, TurnRow.id < turn)
        return await connection.scalar(before) or 0

    @transaction
    async def session_of_client(self, connection: AsyncConnection, key: ApiKeyId, name: str) -> SessionId | None:
        own = select(SessionRow.id).where(SessionRow.api_key_id == key, SessionRow.external_id == storable(name))
        found: UUID | None = await connection.scalar(own.order_by(SessionRow.last_turn_at.desc()).limit(1))
        return None if found is None else SessionId(found)

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
    found = await _read_turns(connection, _OF_ID, {"turn": turn})
    return found[0] if found else None


async def _read_turns(connection: AsyncConnection, query: TextClause, parameters: dict[str, Any]) -> list[TurnView]:
    rows = await connection.execute(query, parameters)
    content = content_of(connection)
    return [_turn_view(row, content) for row in opened(connection, rows, turns="id", judgements="judgement")]


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
        matched_by=None if row.matched_by is None else MatchedBy(row.matched_by),
        number=row.number if row.kind == TurnKind.MAIN else None,
        kind=TurnKind(row.kind),
        kind_reason=row.kind_reason,
        status=status,
        error=row.error,
        version=row.version,
        outcome=outcome,
        why=explain(outcome, row.outcome_detail, status, waiting),
        verdict=row.verdict,
        expected=row.expected,
        votes=row.votes,
        hints=TaughtHint.of(row.hint, row.hint_source, row.taught),
        sample=None if row.sample_state is None else SampleState(row.sample_state),
        reward=row.reward,
        step=row.step,
        tokens=row.tokens,
        being_judged=row.being_judged,
        episode_id=None if row.episode_id is None else EpisodeId(row.episode_id),
        started_at=row.started_at,
        announced_at=row.announced_at,
        lessons=LessonShown.of(shown_lessons(row.lessons, row.lesson_texts, content)),
    )


def _first_messages(row: Any, content: ContentCodec) -> Sequence[Message]:
    """First messages of a session; none if they cannot be decrypted, since one session must not hide the others."""
    if row.first_messages is None:
        return ()
    try:
        messages: list[Message] = content.read_json(row.first_messages, "turns.messages_added", row.first_turn)
    except (ContentUnreadable, EncryptionKeyMissing):
        return ()
    return messages


def _session_view(row: Any, content: ContentCodec) -> SessionView:
    return SessionView(
        id=SessionId(row.id),
        short_id=short_form(row.id, row.id_before, row.id_after),
        policy=row.policy,
        title=_title(_first_messages(row, content)),
        erased=row.first_turn is None,
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
        praised=row.praised,
        blamed=row.blamed,
        first_version=row.first_version,
        last_version=row.last_version,
        task_outcome=row.task_outcome,
        key_id=ApiKeyId(row.api_key_id),
        episode_id=None if row.episode_id is None else EpisodeId(row.episode_id),
    )


def _title(messages: Sequence[Message]) -> str | None:
    title = title_of(messages)
    return None if title is None else storable(title)
