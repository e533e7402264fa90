"""Answers of judges in PostgreSQL: inserted once, as they came, and read when a judgement is continued.

Every function works in the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Text, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.ids import JudgementId
from clawloop.judging.parsing import HintVote, Vote
from clawloop.judging.records import DIRECT, VOTES, OpenJudgement, StoredHint, StoredVote
from db.content import ContentCodec, content_of
from db.content_rows import answer_row
from db.exact_json import storable
from db.tables import HintRow, VoteRow
from db.training.recipes import recipe_by_hash

_CHOICES: tuple[Vote, ...] = (1, 0, -1)
_IMPOSSIBLE = -9999.0  # how vLLM writes −∞, which JSON has no number for

# An erasure of one of them waits until the answer is inserted. Locked by id, in the order of erasures.
_LOCK_TURNS = text("""
    SELECT t.id FROM judgements j JOIN turns t ON t.id IN (j.turn_id, j.shown_by) WHERE j.id = :judgement_id
    ORDER BY t.id FOR KEY SHARE OF t
""")
# Nothing is inserted if the turn, or the one that holds its next state, was erased; nor a vote after the verdict was
# decided: a verdict always agrees with its stored votes. A vote that is being inserted delays the decision. Only a
# direct vote may come later: a closing asks for it where the votes cancelled out.
_INSERT_VOTES = text("""
    INSERT INTO votes (judgement_id, kind, index, raw, score)
    SELECT j.id, :kind, a.index, a.raw, a.score
    FROM judgements j JOIN turns t ON t.id = j.turn_id LEFT JOIN turns b ON b.id = j.shown_by,
        unnest(CAST(:indices AS int[]), CAST(:raws AS text[]), CAST(:scores AS int[])) AS a(index, raw, score)
    WHERE j.id = :judgement_id AND t.outcome <> 'erased' AND (b.id IS NULL OR b.outcome <> 'erased')
        AND (j.decided_at IS NULL OR (:kind = 'direct' AND j.verdict IS NOT NULL))
    FOR KEY SHARE OF j ON CONFLICT DO NOTHING
""").bindparams(bindparam("kind", type_=Text))
_INSERT_HINTS = text("""
    INSERT INTO hints (judgement_id, kind, index, raw, accepted, text)
    SELECT j.id, :kind, a.index, a.raw, a.accepted, a.text
    FROM judgements j JOIN turns t ON t.id = j.turn_id LEFT JOIN turns b ON b.id = j.shown_by,
        unnest(CAST(:indices AS int[]), CAST(:raws AS text[]), CAST(:accepted AS bool[]), CAST(:texts AS text[]))
            AS a(index, raw, accepted, text)
    WHERE j.id = :judgement_id AND t.outcome <> 'erased' AND (b.id IS NULL OR b.outcome <> 'erased')
    FOR KEY SHARE OF j ON CONFLICT DO NOTHING
""").bindparams(bindparam("kind", type_=Text))


async def insert_votes(
    connection: AsyncConnection, judgement: JudgementId, kind: str, votes: Sequence[StoredVote]
) -> None:
    """Insert votes. Idempotent: the first one of its kind and index counts."""
    content = content_of(connection)
    rows = {
        "judgement_id": judgement,
        "kind": kind,
        "indices": [index for index, _, _ in votes],
        "raws": [
            content.write_text(storable(raw), "votes.raw", answer_row(judgement, kind, index))
            for index, raw, _ in votes
        ],
        "scores": [vote for _, _, vote in votes],
    }
    await connection.execute(_LOCK_TURNS, {"judgement_id": judgement})
    await connection.execute(_INSERT_VOTES, rows)


async def insert_direct_vote(
    connection: AsyncConnection, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
) -> Mapping[Vote, float]:
    """Insert a direct vote; the first one counts, and is returned."""
    await insert_votes(connection, judgement, DIRECT, [(0, direct_to_text(logprobs), vote)])
    raw = await _direct(connection, judgement)
    return logprobs if raw is None else direct_from_text(raw)


async def insert_hints(
    connection: AsyncConnection, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]
) -> None:
    """Insert hints. Idempotent: the first one of its kind and index counts."""
    content = content_of(connection)
    rows: dict[str, Any] = {"judgement_id": judgement, "kind": kind}
    rows |= {name: [] for name in ("indices", "raws", "accepted", "texts")}
    for index, raw, hint in hints:
        place = answer_row(judgement, kind, index)
        said = None if hint is None or hint.text is None else storable(hint.text)
        rows["indices"].append(index)
        rows["raws"].append(content.write_text(storable(raw), "hints.raw", place))
        rows["accepted"].append(None if hint is None else hint.accepted)
        rows["texts"].append(content.write_text(said, "hints.text", place))
    await connection.execute(_LOCK_TURNS, {"judgement_id": judgement})
    await connection.execute(_INSERT_HINTS, rows)


async def read_open(
    connection: AsyncConnection, judgement: JudgementId, recipe_hash: str, hint_kind: str
) -> OpenJudgement:
    """A stored judgement with its recipe, votes, and hints of one kind."""
    recipe = await recipe_by_hash(connection, recipe_hash)
    votes = select(VoteRow.index.label("n"), VoteRow.score).where(
        VoteRow.judgement_id == judgement, VoteRow.kind == VOTES
    )
    hints = select(HintRow.index.label("n"), HintRow.accepted, HintRow.text).where(
        HintRow.judgement_id == judgement, HintRow.kind == hint_kind
    )
    raw, content = await _direct(connection, judgement), content_of(connection)

    def hint_text(stored: str | None, index: int) -> str | None:
        return content.read_text(stored, "hints.text", answer_row(judgement, hint_kind, index))

    return OpenJudgement(
        judgement,
        recipe,
        {row.n: row.score for row in await connection.execute(votes)},
        {
            row.n: None if row.accepted is None else HintVote(row.accepted, hint_text(row.text, row.n))
            for row in await connection.execute(hints)
        },
        None if raw is None else direct_from_text(raw),
    )


def direct_to_text(logprobs: Mapping[Vote, float]) -> str:
    """The raw answer of a direct vote, e.g. `{"1": -0.1, "0": -3.0, "-1": -9999.0}`."""
    return json.dumps({str(choice): max(logprobs[choice], _IMPOSSIBLE) for choice in _CHOICES})


def direct_from_text(raw: str) -> dict[Vote, float]:
    """The log-probs of a direct vote's raw answer."""
    logprobs = json.loads(raw)
    return {choice: float(logprobs[str(choice)]) for choice in _CHOICES}


async def _direct(connection: AsyncConnection, judgement: JudgementId) -> str | None:
    query = select(VoteRow.raw).where(VoteRow.judgement_id == judgement, VoteRow.kind == DIRECT)
    stored: str | None = await connection.scalar(query)
    return None if stored is None else read_direct(content_of(connection), stored, judgement)


def read_direct(content: ContentCodec, stored: str, judgement: UUID) -> str:
    """The raw answer of a judgement's direct vote."""
    return content.read_text(stored, "votes.raw", answer_row(judgement, DIRECT, 0))
