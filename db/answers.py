"""Answers of judges in PostgreSQL: each kept once, as it came, and read when a judgement is gone on with.

Knows nothing about what they decide. Every function works in the caller's transaction.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Integer, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.ids import JudgementId
from clawloop.judging.parsing import HintVote, Vote
from clawloop.judging.records import DIRECT, VOTES, OpenJudgement
from db.direct_votes import direct_from_text
from db.exact_json import storable
from db.recipes import recipe_by_hash
from db.tables import Hint
from db.tables import Vote as VoteRow

# An answer that comes when its turn is erased is not kept; one that is being kept holds the erasure up.
_INSERT_VOTE = text("""
    INSERT INTO votes (judgement_id, kind, index, raw, score)
    SELECT j.id, :kind, :index, :raw, :score FROM judgements j JOIN turns t ON t.id = j.turn_id
    WHERE j.id = :judgement_id AND t.outcome <> 'erased' FOR KEY SHARE OF t ON CONFLICT DO NOTHING
""").bindparams(bindparam("index", type_=Integer), bindparam("score", type_=Integer))
_INSERT_HINT = text("""
    INSERT INTO hints (judgement_id, kind, index, raw, accepted, text)
    SELECT j.id, :kind, :index, :raw, :accepted, :text FROM judgements j JOIN turns t ON t.id = j.turn_id
    WHERE j.id = :judgement_id AND t.outcome <> 'erased' FOR KEY SHARE OF t ON CONFLICT DO NOTHING
""").bindparams(bindparam("index", type_=Integer), bindparam("accepted", type_=Boolean))


async def keep_vote(
    judgement: JudgementId, kind: str, index: int, raw: str, vote: Vote | None, connection: AsyncConnection
) -> None:
    """The first one of its kind and index counts."""
    row = {"judgement_id": judgement, "kind": kind, "index": index, "raw": storable(raw), "score": vote}
    await connection.execute(_INSERT_VOTE, row)


async def keep_hint(
    judgement: JudgementId, kind: str, index: int, raw: str, hint: HintVote | None, connection: AsyncConnection
) -> None:
    """The first one of its kind and index counts."""
    row = {
        "judgement_id": judgement,
        "kind": kind,
        "index": index,
        "raw": storable(raw),
        "accepted": None if hint is None else hint.accepted,
        "text": None if hint is None or hint.text is None else storable(hint.text),
    }
    await connection.execute(_INSERT_HINT, row)


async def read_open(
    connection: AsyncConnection, judgement: JudgementId, recipe_hash: str, hint_kind: str
) -> OpenJudgement:
    recipe = await recipe_by_hash(connection, recipe_hash)
    votes = select(VoteRow.index.label("n"), VoteRow.score).where(
        VoteRow.judgement_id == judgement, VoteRow.kind == VOTES
    )
    hints = select(Hint.index.label("n"), Hint.accepted, Hint.text).where(
        Hint.judgement_id == judgement, Hint.kind == hint_kind
    )
    direct = select(VoteRow.raw).where(VoteRow.judgement_id == judgement, VoteRow.kind == DIRECT)
    raw = await connection.scalar(direct)
    return OpenJudgement(
        judgement,
        recipe,
        {row.n: row.score for row in await connection.execute(votes)},
        {
            row.n: None if row.accepted is None else HintVote(row.accepted, row.text)
            for row in await connection.execute(hints)
        },
        None if raw is None else direct_from_text(raw),
    )
