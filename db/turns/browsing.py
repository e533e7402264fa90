"""Finds sessions by their messages and verdicts, and reads them as chats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.browsing import (
    ChatPage,
    ChatTurn,
    GivenRating,
    JudgeHint,
    JudgementView,
    JudgeVote,
    SessionFilter,
    SessionSummary,
)
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome, TurnStatus
from clawloop.encryption.key_file import SETTING
from clawloop.errors import StateConflict
from clawloop.ids import ApiKeyId, SessionId, TurnId
from db.content import ContentCodec, content_of, plain_length
from db.content_rows import answer_row
from db.database import Database, transaction
from db.exact_json import exact_json, storable
from db.training.policies import require_policy
from db.turns.sessions import SESSION_NEIGHBOURS, first_messages, session_view

_NEWEST_JUDGEMENT = """
    SELECT * FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
    ORDER BY revision DESC, decided_at DESC LIMIT 1"""
# The newest sessions first, so that a common filter ends early.
_PAGE = """
    SELECT * FROM sessions c
    WHERE (CAST(:policy AS text) IS NULL OR policy = :policy) AND (CAST(:state AS text) IS NULL OR state = :state)
      AND (CAST(:after AS uuid) IS NULL OR (last_turn_at, id) < (
          SELECT last_turn_at, id FROM sessions WHERE id = :after))
      {having}
    ORDER BY last_turn_at DESC, id DESC LIMIT :limit"""
_TURN_FILTERS = {
    "kind": "t.kind = :kind",
    "outcome": "t.outcome = :outcome",
    "version": "t.version = :version",
    # Stored as JSON text, so that NUL and lone surrogates, which no operator on JSON takes, are found or passed over.
    # `position` takes half as long as ILIKE, and every turn is read: no index finds parts of words without an extension
    # that PostgreSQL comes without.
    "text": """(position(lower(CAST(:text AS text)) IN lower(t.messages_added::text)) > 0
        OR position(lower(CAST(:text AS text)) IN lower(t.response::text)) > 0)""",
    # All at once: one look-up a turn takes seconds for 10,000 sessions none of which fits.
    "verdict": """t.id IN (
        SELECT turn_id FROM (
            SELECT DISTINCT ON (turn_id) turn_id, verdict FROM judgements WHERE decided_at IS NOT NULL
            ORDER BY turn_id, revision DESC, decided_at DESC) newest
        WHERE verdict = :verdict)""",
    "judged": """:judged = EXISTS (
        SELECT FROM judgements j WHERE j.turn_id = t.id AND j.decided_at IS NOT NULL AND j.verdict IS NOT NULL)""",
}
_SUMMARIES = """
    SELECT s.*, counts.*, opening.messages_added AS first_messages, opening.id AS first_turn,
        {neighbours}
    FROM ({chosen}) s
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE t.kind = 'main') AS main_turns,
            count(*) FILTER (WHERE t.kind = 'side') AS side_turns,
            count(*) FILTER (WHERE t.outcome = 'waiting') AS waiting,
            count(*) FILTER (WHERE t.outcome IN ('sampled', 'trained')) AS sampled,
            count(*) FILTER (WHERE j.verdict = 1) AS praised, count(*) FILTER (WHERE j.verdict = -1) AS blamed,
            coalesce(min(t.version), 0) AS first_version, coalesce(max(t.version), 0) AS last_version
        FROM turns t LEFT JOIN LATERAL ({newest}) j ON true
        WHERE t.session_id = s.id) counts
    LEFT JOIN LATERAL (
        SELECT t.id, t.messages_added FROM turns t WHERE t.session_id = s.id AND t.outcome <> 'erased'
        ORDER BY t.kind, t.id LIMIT 1) opening ON true
    ORDER BY s.last_turn_at DESC, s.id DESC
"""
_ONE = text(
    _SUMMARIES.format(
        chosen="SELECT * FROM sessions WHERE id = :session", newest=_NEWEST_JUDGEMENT, neighbours=SESSION_NEIGHBOURS
    ),
)
_CHAT = text(f"""
    WITH chosen AS (
        SELECT id, count(*) FILTER (WHERE kind = 'main') OVER (ORDER BY id) AS number
        FROM turns WHERE session_id = :session ORDER BY id OFFSET :first LIMIT :limit)
    SELECT t.*, chosen.number, {plain_length("t.response_ids")} / 4 AS tokens, j.id AS judgement_id, j.revision,
        j.verdict, j.verdict_why, j.expected, j.hint, j.hint_why, j.why AS decided_why, j.decided_at, r.name AS recipe,
        s.state AS sample_state, s.reward AS sample_reward,
        EXISTS (SELECT FROM judgements o WHERE o.turn_id = t.id AND o.decided_at IS NULL) AS open_judgement,
        (SELECT max(m.step) FROM step_samples m JOIN steps p ON p.policy = m.policy AND p.n = m.step
            WHERE m.sample_id = s.id AND m.dropped IS NULL AND p.state = 'committed') AS step
    FROM chosen JOIN turns t ON t.id = chosen.id
    LEFT JOIN LATERAL ({_NEWEST_JUDGEMENT}) j ON true
    LEFT JOIN recipes r ON r.hash = j.recipe_hash
    LEFT JOIN samples s ON s.judgement_id = j.id
    ORDER BY t.id
""")
_POSITION = text("SELECT count(*) FROM turns WHERE session_id = :session AND id < :turn")
_TOTAL = text("SELECT count(*) FROM turns WHERE session_id = :session")
_VOTES = text("SELECT *, index AS n FROM votes WHERE judgement_id = ANY(:judgements) ORDER BY kind, index")
_HINTS = text("SELECT *, index AS n FROM hints WHERE judgement_id = ANY(:judgements) ORDER BY kind, index")
_RATINGS = text("SELECT * FROM feedback WHERE turn_id = ANY(:turns) ORDER BY received_at, id")
_OWNER = text("""
    SELECT t.session_id, s.api_key_id FROM turns t JOIN sessions s ON s.id = t.session_id WHERE t.id = :turn
""")
_IN_EPISODE = text("SELECT episode_id IS NOT NULL FROM api_keys WHERE id = :key")
_BY_CLIENTS_NAME = text("""
    SELECT id FROM sessions WHERE api_key_id = :key AND external_id = :name ORDER BY last_turn_at DESC LIMIT 1
""")


class PostgresSessionBrowser:
    """Satisfies `api.ports.SessionBrowser`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def search(
        self, connection: AsyncConnection, wanted: SessionFilter, after: SessionId | None, limit: int
    ) -> list[SessionSummary]:
        await require_policy(connection, wanted.policy)
        filters = {name: value for name in _TURN_FILTERS if (value := getattr(wanted, name)) is not None}
        having = " AND ".join(_TURN_FILTERS[name] for name in filters)
        page = _PAGE.format(having=f"AND EXISTS (SELECT FROM turns t WHERE t.session_id = c.id AND {having})")
        if not filters:
            page = _PAGE.format(having="")
        parameters: dict[str, Any] = filters | {
            "policy": None if wanted.policy is None else storable(wanted.policy),
            "state": wanted.state,
            "after": after,
            "limit": limit,
        }
        if wanted.text is not None:
            if content_of(connection).is_on:
                raise StateConflict(
                    f"Text cannot be searched: content is encrypted, as {SETTING} says. Leave `text` out, or use"
                    " `clawloop export` and search the file.",
                    code="search_is_off",
                    field="text",
                )
            parameters["text"] = _as_stored(wanted.text)
        query = text(_SUMMARIES.format(chosen=page, newest=_NEWEST_JUDGEMENT, neighbours=SESSION_NEIGHBOURS))
        content = content_of(connection)
        return [_summary(row, content) for row in await connection.execute(query, parameters)]

    @transaction
    async def chat(self, connection: AsyncConnection, session: SessionId, first: int, limit: int) -> ChatPage | None:
        row = (await connection.execute(_ONE, {"session": session})).one_or_none()
        if row is None:
            return None
        total = await connection.scalar(_TOTAL, {"session": session}) or 0
        turns = await _read_turns(connection, session, first, limit)
        in_episode = bool(await connection.scalar(_IN_EPISODE, {"key": row.api_key_id}))
        return ChatPage(
            _summary(row, content_of(connection)), ApiKeyId(row.api_key_id), turns, total, first, in_episode
        )

    @transaction
    async def turn(self, connection: AsyncConnection, turn: TurnId) -> tuple[ChatTurn, ApiKeyId] | None:
        owner = (await connection.execute(_OWNER, {"turn": turn})).one_or_none()
        if owner is None:
            return None
        session = SessionId(owner.session_id)
        first = await connection.scalar(_POSITION, {"session": session, "turn": turn}) or 0
        [read] = await _read_turns(connection, session, first, 1)
        return read, ApiKeyId(owner.api_key_id)

    @transaction
    async def position(self, connection: AsyncConnection, session: SessionId, turn: TurnId) -> int:
        return await connection.scalar(_POSITION, {"session": session, "turn": turn}) or 0

    @transaction
    async def session_named(self, connection: AsyncConnection, key: ApiKeyId, name: str) -> SessionId | None:
        found: UUID | None = await connection.scalar(_BY_CLIENTS_NAME, {"key": key, "name": storable(name)})
        return None if found is None else SessionId(found)


def _as_stored(wanted: str) -> str:
    """A text as it is inside the JSON text it is stored in."""
    return exact_json(wanted)[1:-1]


def _summary(row: Any, content: ContentCodec) -> SessionSummary:
    return SessionSummary(
        view=session_view(row, content),
        opening=first_messages(row, content),
        praised=row.praised,
        blamed=row.blamed,
        versions=(row.first_version, row.last_version),
        task_outcome=row.task_outcome,
    )


async def _read_turns(connection: AsyncConnection, session: SessionId, first: int, limit: int) -> list[ChatTurn]:
    rows = (await connection.execute(_CHAT, {"session": session, "first": first, "limit": limit})).all()
    content = content_of(connection)
    judgements = {"judgements": [row.judgement_id for row in rows if row.judgement_id is not None]}
    votes: defaultdict[UUID, list[JudgeVote]] = defaultdict(list)
    for vote in await connection.execute(_VOTES, judgements):
        raw = content.read_text(vote.raw, "votes.raw", answer_row(vote.judgement_id, vote.kind, vote.n))
        votes[vote.judgement_id].append(JudgeVote(vote.kind, raw, vote.score))
    hints: defaultdict[UUID, list[JudgeHint]] = defaultdict(list)
    for hint in await connection.execute(_HINTS, judgements):
        place = answer_row(hint.judgement_id, hint.kind, hint.n)
        raw = content.read_text(hint.raw, "hints.raw", place)
        hints[hint.judgement_id].append(
            JudgeHint(raw, hint.accepted, content.read_text(hint.text, "hints.text", place))
        )
    ratings: defaultdict[UUID, list[GivenRating]] = defaultdict(list)
    for given in await connection.execute(_RATINGS, {"turns": [row.id for row in rows]}):
        said = content.read_text(given.text, "feedback.text", given.id)
        ratings[given.turn_id].append(GivenRating(given.score, said, given.effect, given.received_at))
    return [_turn(row, content, votes[row.judgement_id], hints[row.judgement_id], ratings[row.id]) for row in rows]


def _turn(
    row: Any,
    content: ContentCodec,
    votes: Sequence[JudgeVote],
    hints: Sequence[JudgeHint],
    ratings: Sequence[GivenRating],
) -> ChatTurn:
    return ChatTurn(
        id=TurnId(row.id),
        session_id=SessionId(row.session_id),
        parent=None if row.parent_turn_id is None else TurnId(row.parent_turn_id),
        number=row.number if row.kind == TurnKind.MAIN else None,
        kind=TurnKind(row.kind),
        kind_reason=row.kind_reason,
        status=TurnStatus(row.status),
        error=content.read_text(row.error, "turns.error", row.id),
        version=row.version,
        outcome=TurnOutcome(row.outcome),
        why=row.outcome_detail,
        kept=row.messages_kept,
        added=content.read_json(row.messages_added, "turns.messages_added", row.id),
        response=content.read_json(row.response, "turns.response", row.id),
        tokens=row.tokens,
        started_at=row.started_at,
        finished_at=row.finished_at,
        step=row.step,
        open_judgement=row.open_judgement,
        judgement=None if row.judgement_id is None else _judgement(row, content, votes, hints),
        ratings=ratings,
        in_episode=row.episode_id is not None,
    )


def _judgement(
    row: Any, content: ContentCodec, votes: Sequence[JudgeVote], hints: Sequence[JudgeHint]
) -> JudgementView:
    return JudgementView(
        revision=row.revision,
        verdict=row.verdict,
        verdict_why=row.verdict_why,
        expected=row.expected,
        hint=content.read_text(row.hint, "judgements.hint", row.judgement_id),
        hint_why=row.hint_why,
        why=row.decided_why,
        recipe=row.recipe,
        decided_at=row.decided_at,
        sample=None if row.sample_state is None else SampleState(row.sample_state),
        reward=row.sample_reward,
        votes=votes,
        hints=hints,
    )
