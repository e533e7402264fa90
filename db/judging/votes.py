"""Answers of judges in PostgreSQL: inserted once, as they came, and read by each insert and when a judgement goes on.

Every function works in the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.ids import JudgementId
from clawloop.core.judging.prompts import JudgeReply
from clawloop.core.judging.records import DIRECT, VOTES, OpenJudgement, StoredAnswers, StoredHint, StoredVote
from clawloop.core.judging.voting import HintVote, Vote
from db.content import ContentCodec, answer_row, content_of, storable
from db.database import Raw, raw_connection
from db.training.recipes import recipe_by_hash

_CHOICES: tuple[Vote, ...] = (1, 0, -1)
_IMPOSSIBLE = -9999.0  # how vLLM writes −∞, which JSON has no number for

# An erasure of one of them waits until the answer is inserted. Locked by id, in the order of erasures.
_LOCK_TURNS = """
    SELECT t.id FROM turns t WHERE t.id IN (
        SELECT unnest(ARRAY[j.turn_id, j.shown_by]) FROM judgements j WHERE j.id = ANY(%b::uuid[]))
    ORDER BY t.id FOR KEY SHARE OF t
"""
# Nothing is inserted if the turn, or the one that holds its next state, was erased; nor a vote after the verdict was
# decided: a verdict always agrees with its stored votes. A vote that is being inserted delays the decision. Only a
# direct vote may come later: a closing asks for it where the votes cancelled out. Judgements are locked by id, as a
# decision locks them.
_INSERT_VOTES = """
    INSERT INTO votes (judgement_id, kind, index, raw, score, asked_turn, asked_choice)
    SELECT j.id, a.kind, a.index, a.raw, a.score, a.asked_turn, a.asked_choice
    FROM unnest(%b::uuid[], %b::text[], %b::int[], %b::text[], %s::int[], %s::uuid[], %s::int[])
            AS a(judgement_id, kind, index, raw, score, asked_turn, asked_choice)
        JOIN judgements j ON j.id = a.judgement_id
        JOIN turns t ON t.id = j.turn_id LEFT JOIN turns b ON b.id = j.shown_by
    WHERE t.outcome <> 'erased' AND (b.id IS NULL OR b.outcome <> 'erased')
        AND (j.decided_at IS NULL OR (a.kind = 'direct' AND j.verdict IS NOT NULL))
    ORDER BY j.id FOR KEY SHARE OF j ON CONFLICT DO NOTHING
"""
_INSERT_HINTS = """
    INSERT INTO hints (judgement_id, kind, index, raw, accepted, text)
    SELECT j.id, a.kind, a.index, a.raw, a.accepted, a.text
    FROM unnest(%b::uuid[], %b::text[], %b::int[], %b::text[], %s::bool[], %s::text[])
            AS a(judgement_id, kind, index, raw, accepted, text)
        JOIN judgements j ON j.id = a.judgement_id
        JOIN turns t ON t.id = j.turn_id LEFT JOIN turns b ON b.id = j.shown_by
    WHERE t.outcome <> 'erased' AND (b.id IS NULL OR b.outcome <> 'erased')
    ORDER BY j.id FOR KEY SHARE OF j ON CONFLICT DO NOTHING
"""

# Separate statements: they see rows committed while an insert waited for another transaction's row.
_STORED_VOTES = """
    SELECT j.id, j.decided_at, v.kind, v.index, v.score, CASE WHEN v.kind = 'direct' THEN v.raw END
    FROM judgements j LEFT JOIN votes v ON v.judgement_id = j.id WHERE j.id = ANY(%b::uuid[])
"""
_STORED_HINTS = "SELECT judgement_id, kind, index, accepted, text FROM hints WHERE judgement_id = ANY(%b::uuid[])"

Votes: TypeAlias = tuple[JudgementId, str, Sequence[StoredVote], Mapping[int, JudgeReply]]
"""Votes of one judgement and kind, and by their index where a gateway recorded them."""
Hints: TypeAlias = tuple[JudgementId, str, Sequence[StoredHint]]
"""Hints of one judgement and kind."""


async def insert_votes(connection: AsyncConnection, votes: Sequence[Votes]) -> list[StoredAnswers]:
    """Insert votes of any number of judgements; returns the answers then stored of each.

    Idempotent: the first one of its kind and index counts.
    """
    content = content_of(connection)
    rows: list[tuple[Any, ...]] = []
    for judgement, kind, several, replies in votes:
        for index, raw, vote in several:
            stored = content.write_text(storable(raw), "votes.raw", answer_row(judgement, kind, index))
            reply = replies.get(index)
            recorded = (None, None) if reply is None else (reply.first, reply.choice)
            rows.append((judgement, kind, index, stored, vote, *recorded))
    return await _insert(connection, _INSERT_VOTES, rows, [judgement for judgement, *_ in votes])


async def insert_hints(connection: AsyncConnection, hints: Sequence[Hints]) -> list[StoredAnswers]:
    """Insert hints of any number of judgements; returns the answers then stored of each.

    Idempotent: the first one of its kind and index counts.
    """
    content = content_of(connection)
    rows: list[tuple[Any, ...]] = []
    for judgement, kind, several in hints:
        for index, raw, hint in several:
            place = answer_row(judgement, kind, index)
            said = None if hint is None or hint.text is None else storable(hint.text)
            stored = content.write_text(storable(raw), "hints.raw", place)
            accepted = None if hint is None else hint.accepted
            rows.append((judgement, kind, index, stored, accepted, content.write_text(said, "hints.text", place)))
    return await _insert(connection, _INSERT_HINTS, rows, [judgement for judgement, *_ in hints])


async def _insert(
    connection: AsyncConnection, statement: str, rows: Sequence[tuple[Any, ...]], judgements: Sequence[JudgementId]
) -> list[StoredAnswers]:
    """Insert rows; returns the answers then stored of each judgement.

    Args:
        statement: takes a list of each column of `rows`, of which the first is the judgement.
    """
    raw = await raw_connection(connection)
    columns = [list(column) for column in zip(*rows, strict=True)]
    async with raw.pipeline():
        if columns:
            await raw.execute(_LOCK_TURNS, [columns[0]])
            await raw.execute(statement, columns)
        votes, hints = await _query_answers(raw, judgements)
    read = _read_answers(content_of(connection), await votes.fetchall(), await hints.fetchall())
    return [read.get(judgement, StoredAnswers()) for judgement in judgements]


async def _query_answers(
    raw: Raw, judgements: Sequence[JudgementId]
) -> tuple[psycopg.AsyncCursor[TupleRow], psycopg.AsyncCursor[TupleRow]]:
    """The rows of _STORED_VOTES and _STORED_HINTS; in a pipeline, which must end before they are read."""
    return await raw.execute(_STORED_VOTES, [list(judgements)]), await raw.execute(_STORED_HINTS, [list(judgements)])


def _read_answers(
    content: ContentCodec, votes: Sequence[tuple[Any, ...]], hints: Sequence[tuple[Any, ...]]
) -> dict[UUID, StoredAnswers]:
    """The stored answers of each judgement, from the rows of _STORED_VOTES and _STORED_HINTS."""
    read: dict[UUID, StoredAnswers] = {}
    for judgement, decided_at, kind, index, score, raw in votes:
        known = read.setdefault(judgement, StoredAnswers({}, {}, None, decided_at))
        if kind == VOTES:
            read[judgement] = replace(known, votes={**known.votes, index: score})
        elif raw is not None:
            read[judgement] = replace(known, direct=direct_from_text(read_direct(content, raw, judgement)))
    for judgement, kind, index, accepted, stored in hints:
        hint = None
        if accepted is not None:
            hint = HintVote(accepted, content.read_text(stored, "hints.text", answer_row(judgement, kind, index)))
        known = read[judgement]
        read[judgement] = replace(known, hints={**known.hints, (kind, index): hint})
    return read


async def insert_direct_vote(
    connection: AsyncConnection, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
) -> StoredAnswers:
    """Insert a direct vote; the first one counts. Returns the answers then stored of the judgement."""
    (stored,) = await insert_votes(connection, [(judgement, DIRECT, [(0, direct_to_text(logprobs), vote)], {})])
    return stored


async def read_open(
    connection: AsyncConnection, judgement: JudgementId, recipe_hash: str, hint_kind: str
) -> OpenJudgement:
    """A stored judgement with its recipe, votes, and hints of one kind."""
    recipe = await recipe_by_hash(connection, recipe_hash)
    raw = await raw_connection(connection)
    async with raw.pipeline():
        votes, hints = await _query_answers(raw, [judgement])
    stored = _read_answers(content_of(connection), await votes.fetchall(), await hints.fetchall())[judgement]
    hints_of_kind = stored.hints_of(hint_kind)
    return OpenJudgement(
        judgement, recipe, dict(stored.votes), hints_of_kind, stored.direct, stored.decided_at, continued=True
    )


def direct_to_text(logprobs: Mapping[Vote, float]) -> str:
    """The raw answer of a direct vote, e.g. `{"1": -0.1, "0": -3.0, "-1": -9999.0}`."""
    return json.dumps({str(choice): max(logprobs[choice], _IMPOSSIBLE) for choice in _CHOICES})


def direct_from_text(raw: str) -> dict[Vote, float]:
    """The log-probs of a direct vote's raw answer."""
    logprobs = json.loads(raw)
    return {choice: float(logprobs[str(choice)]) for choice in _CHOICES}


def read_direct(content: ContentCodec, stored: str, judgement: UUID) -> str:
    """The raw answer of a judgement's direct vote."""
    return content.read_text(stored, "votes.raw", answer_row(judgement, DIRECT, 0))
