"""Reads what judging needs of turns, of any number of them in a handful of statements.

The statements go to psycopg directly: with SQLAlchemy each takes several times the CPU, and each judged turn pays for
it. What is rare (feedback, a conversation that is in no cache) uses the shared functions. Every function works in the
caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg.rows import dict_row
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import MatchedBy, TurnOutcome
from clawloop.ids import ApiKeyId, FeedbackId, SessionId, TurnId
from clawloop.judging.records import CurrentJudgement, GivenFeedback, TurnContext
from clawloop.turns.parents import may_be_placed
from db.content import content_of
from db.database import raw_connection
from db.tables import FeedbackRow, TurnRow
from db.turns.conversation_cache import ConversationCache
from db.turns.prepared_turn import Request
from db.turns.read import stored_turn
from db.turns.session_lookup import candidates_of_many, find_places_in

# The nearest main turn above; side turns between do not count.
_ABOVE = """(
    WITH RECURSIVE up AS (
        SELECT p.id, p.kind, p.parent_turn_id FROM turns p WHERE p.id = t.parent_turn_id
        UNION ALL
        SELECT p.id, p.kind, p.parent_turn_id FROM up JOIN turns p ON p.id = up.parent_turn_id
        WHERE up.kind = 'side')
    SELECT id FROM up WHERE kind = 'main')"""
# A turn is overtaken by one that entered or was signalled before it: transactions do not commit in the order in which
# they began, which `entered_at` is, so the later turn may have been judged before this one was there.
# One statement reads all that has one row: each statement costs a judge worker more CPU than it costs PostgreSQL.
_TURNS = f"""
    WITH asked AS (SELECT t.id, CASE WHEN %b THEN {_ABOVE} END AS above FROM turns t WHERE t.id = ANY(%b::uuid[]))
    SELECT {", ".join(f"t.{column.name}" for column in TurnRow.__table__.columns)},
        s.policy, s.api_key_id, s.task_outcome, l.tools,
        current.revision AS judged_revision, current.outcome AS judged_outcome, current.verdict AS judged_verdict,
        current.shown_by AS judged_by,
        (SELECT count(*) FROM turns o WHERE o.session_id = t.session_id AND o.kind = 'main' AND o.id <= t.id) AS number,
        {_ABOVE} AS follows, below.followed_by, below.overtaken_by,
        EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id) AS rated,
        EXISTS (
            SELECT FROM turns o
            WHERE o.session_id = t.session_id AND o.outcome IN ('trained', 'rolled_back')) AS session_trained
    FROM (SELECT id FROM asked UNION SELECT above FROM asked) wanted
    JOIN turns t ON t.id = wanted.id JOIN sessions s ON s.id = t.session_id
    LEFT JOIN tool_lists l ON l.sha256 = t.tools_sha256
    LEFT JOIN LATERAL (
        SELECT j.revision, j.outcome, j.verdict, j.shown_by FROM judgements j
        WHERE j.turn_id = t.id AND j.decided_at IS NOT NULL
        ORDER BY j.revision DESC, j.decided_at DESC LIMIT 1) current ON true
    CROSS JOIN LATERAL (
        WITH RECURSIVE down AS (
            SELECT c.id, c.kind, c.entered_at, c.announced_at FROM turns c WHERE c.parent_turn_id = t.id
            UNION ALL
            SELECT c.id, c.kind, c.entered_at, c.announced_at FROM down JOIN turns c ON c.parent_turn_id = down.id
            WHERE down.kind = 'side')
        SELECT array_agg(id ORDER BY id) AS followed_by,
            array_agg(id) FILTER (
                WHERE entered_at < t.entered_at OR announced_at < coalesce(t.announced_at, 'infinity')) AS overtaken_by
        FROM down WHERE kind = 'main') below
    WHERE t.kind = 'main'
    ORDER BY t.id
"""


async def read_contexts(
    connection: AsyncConnection, conversations: ConversationCache, turn_ids: Sequence[TurnId], *, with_followed: bool
) -> dict[TurnId, tuple[TurnContext, bool]]:
    """The contexts of those that are main turns, and whether a turn of their session was ever trained.

    Args:
        with_followed: also of the main turns that these follow.
    """
    raw = await raw_connection(connection)
    async with raw.cursor(row_factory=dict_row, binary=True) as cursor:
        await cursor.execute(_TURNS, [with_followed, list(turn_ids)])
        rows = await cursor.fetchall()
    requests: list[tuple[SessionId, Request]] = []
    turns = []
    for row in rows:
        conversation = await conversations.of_row(connection, row)
        turn = stored_turn(row, conversation, content_of(connection))
        record = turn.record
        turns.append(turn)
        first = record.group_id or record.turn_id
        requests.append((turn.session_id, Request(record.api_key_id, record.evidence, record.messages, first)))
    candidates = await candidates_of_many(raw, content_of(connection), requests)
    placed = [
        (await find_places_in(connection, session, request)).replies
        if turn.matched_by is not MatchedBy.CONTEXT and may_be_placed(request.history, found)
        else []
        for turn, (session, request), found in zip(turns, requests, candidates, strict=True)
    ]
    return {
        turn.record.turn_id: (
            TurnContext(
                turn=turn,
                number=row["number"],
                seed=request.seed,
                candidates=found,
                follows=None if row["follows"] is None else TurnId(row["follows"]),
                followed_by=[TurnId(later) for later in row["followed_by"] or ()],
                overtaken_by=frozenset(TurnId(later) for later in row["overtaken_by"] or ()),
                current=_current_judgement(row),
                task_outcome=row["task_outcome"],
                feedback=await _feedback(connection, turn.record.turn_id) if row["rated"] else [],
                placed=by_place,
            ),
            row["session_trained"],
        )
        for row, turn, (_, request), found, by_place in zip(rows, turns, requests, candidates, placed, strict=True)
    }


def _current_judgement(row: Mapping[str, Any]) -> CurrentJudgement | None:
    if row["judged_revision"] is None:
        return None
    next_turn_id = None if row["judged_by"] is None else TurnId(row["judged_by"])
    outcome = TurnOutcome(row["judged_outcome"])
    return CurrentJudgement(row["judged_revision"], outcome, row["judged_verdict"], next_turn_id)


async def _feedback(connection: AsyncConnection, turn_id: TurnId) -> list[GivenFeedback]:
    query = select(FeedbackRow).where(FeedbackRow.turn_id == turn_id).order_by(FeedbackRow.received_at, FeedbackRow.id)
    content = content_of(connection)
    return [
        GivenFeedback(
            id=FeedbackId(row.id),
            turn_id=TurnId(row.turn_id),
            api_key_id=ApiKeyId(row.api_key_id),
            score=row.score,
            text=content.read_text(row.text, "feedback.text", row.id),
            received_at=row.received_at,
            applied=row.applied_at is not None,
        )
        for row in await connection.execute(query)
    ]
