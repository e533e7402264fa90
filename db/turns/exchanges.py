"""Reads what turns added to their session, with what judges and people said of them.

Every function works in the caller's transaction. Linear in the messages that were added, whatever a session's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import MatchedBy, Message, TurnRecord
from clawloop.core.contracts.views import (
    Exchange,
    FeedbackView,
    HintView,
    Judged,
    SampleView,
    Tokens,
    TurnDetail,
    TurnView,
    VoteView,
)
from clawloop.core.ids import FeedbackId, SampleId, TurnId
from clawloop.core.turns.canonical import response_digest
from db.content import ANSWER_KEY, ContentCodec, answer_row, bytes_to_advantages, content_of, step_sample_row, storable
from db.encryption.columns import opened
from db.tables import FeedbackRow, HintRow, SampleRow, VoteRow
from db.turns.read import ConversationCache, read_turn

_ADDED = text("""
    SELECT t.id, t.matched_by, t.messages_kept, t.messages_added, t.response, p.response_digest AS parent_digest,
        p.id AS parent, p.messages_kept AS parent_kept, p.messages_added AS parent_added
    FROM turns t LEFT JOIN turns p ON p.id = t.parent_turn_id
    WHERE t.id = ANY(:turns) ORDER BY t.id
""")
_JUDGEMENTS = text("""
    SELECT DISTINCT ON (j.turn_id) j.id, j.turn_id, j.revision, j.verdict_why, j.hint_why, r.name AS recipe
    FROM judgements j JOIN recipes r ON r.hash = j.recipe_hash
    WHERE j.turn_id = ANY(:turns) AND j.decided_at IS NOT NULL
    ORDER BY j.turn_id, j.revision DESC, j.decided_at DESC
""")


_OF_TOKENS = text("""
    SELECT m.policy, m.step, m.sample_id, m.advantages, m.moves, (t.metrics->>'moves_seconds')::float8 AS moves_seconds
    FROM step_samples m JOIN samples s ON s.id = m.sample_id JOIN steps t ON t.policy = m.policy AND t.n = m.step
    WHERE s.turn_id = :turn AND (m.advantages IS NOT NULL OR m.moves IS NOT NULL) ORDER BY m.step DESC LIMIT 1
""")


async def read_exchanges(connection: AsyncConnection, turns: Sequence[TurnId]) -> list[Exchange]:
    judged = await _read_judged(connection, turns)
    content = content_of(connection)
    rows = await connection.execute(_ADDED, {"turns": list(turns)})
    return [_exchange(row, judged[TurnId(row.id)], content) for row in rows]


async def read_reactions(connection: AsyncConnection, turns: Sequence[TurnId]) -> dict[TurnId, Sequence[Message]]:
    """By turn the messages of its request after the reply that it continues."""
    content = content_of(connection)
    rows = await connection.execute(_ADDED, {"turns": list(turns)})
    return {TurnId(row.id): _exchange(row, Judged(), content).said for row in rows}


async def read_detail(connection: AsyncConnection, view: TurnView, *, tokens: bool) -> TurnDetail:
    # Without a cache: people read one turn, and its conversation is large.
    stored = await read_turn(connection, ConversationCache(0), view.id)
    assert stored is not None
    record = stored.record
    sample = select(SampleRow).where(SampleRow.turn_id == view.id).order_by(SampleRow.id.desc()).limit(1)
    row = (await connection.execute(sample)).one_or_none()
    return TurnDetail(
        turn=view,
        asked_for=record.alias,
        engine_id=record.engine_id,
        finish_reason=record.finish_reason,
        finished_at=record.finished_at,
        messages=[_clean(message) for message in record.messages],
        tools=None if record.tools is None else _clean(record.tools),
        response=None if record.response is None else _clean(record.response),
        sampling=_clean(record.sampling),
        judged=(await _read_judged(connection, [view.id]))[view.id],
        sample=None
        if row is None
        else SampleView(
            id=SampleId(row.id),
            state=SampleState(row.state),
            reason=row.reason,
            reward=row.reward,
            hinted=row.hinted_prompts is not None,
        ),
        tokens=await _read_tokens(connection, record) if tokens else None,
    )


async def _read_tokens(connection: AsyncConnection, record: TurnRecord) -> Tokens:
    row = (await connection.execute(_OF_TOKENS, {"turn": record.turn_id})).one_or_none()
    advantages = moves = None
    if row is not None:
        content, place = content_of(connection), step_sample_row(row.policy, row.step, row.sample_id)
        advantages = content.read_bytes(row.advantages, "step_samples.advantages", place)
        moves = content.read_bytes(row.moves, "step_samples.moves", place)
    return Tokens(
        prompt_ids=record.prompt_ids,
        response_ids=record.response_ids,
        logprobs=record.logprobs,
        advantages=None if advantages is None else bytes_to_advantages(advantages),
        moves=None if moves is None else bytes_to_advantages(moves),
        moves_seconds=None if row is None or moves is None else row.moves_seconds,
        step=None if row is None else row.step,
    )


async def read_feedback(connection: AsyncConnection, turns: Sequence[TurnId]) -> list[FeedbackView]:
    """All feedback on these turns, oldest first."""
    query = select(FeedbackRow).where(FeedbackRow.turn_id.in_(turns)).order_by(FeedbackRow.id)
    return [
        FeedbackView(
            id=FeedbackId(row.id),
            turn_id=TurnId(row.turn_id),
            score=row.score,
            text=row.text,
            effect=FeedbackEffect(row.effect),
            received_at=row.received_at,
            applied=row.applied_at is not None,
        )
        for row in opened(connection, await connection.execute(query), feedback="id")
    ]


def _exchange(row: Any, judged: Judged, content: ContentCodec) -> Exchange:
    added = content.read_json(row.messages_added, "turns.messages_added", row.id)
    begin = 0
    if row.parent_digest is not None:
        parent_added = content.read_json(row.parent_added, "turns.messages_added", row.parent)
        if row.messages_kept <= row.parent_kept + len(parent_added):
            # A client sends a reply back in other words than the engine's JSON, so it is stored once more.
            begin = _after_reply(added, row.parent_digest, content)
            if not begin and row.matched_by == MatchedBy.PLACE:
                begin = 1 + max(
                    (n for n, message in enumerate(added) if message.get("role") == "assistant"), default=-1
                )
    response = content.read_json(row.response, "turns.response", row.id)
    return Exchange(
        turn_id=TurnId(row.id),
        said=[_clean(message) for message in added[begin:]],
        repeated=row.messages_kept + begin,
        reply=None if response is None else _clean(response),
        judged=judged,
    )


def _after_reply(messages: Sequence[Message], stored_digest: bytes, content: ContentCodec) -> int:
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].get("role") != "assistant":
            continue
        if stored_digest in content.find_digests([response_digest(messages[place])]):
            return place + 1
    return 0


async def _read_judged(connection: AsyncConnection, turns: Sequence[TurnId]) -> dict[TurnId, Judged]:
    judgements = (await connection.execute(_JUDGEMENTS, {"turns": list(turns)})).all()
    ids, content = [row.id for row in judgements], content_of(connection)
    votes: dict[UUID, list[VoteView]] = {}
    hints: dict[UUID, list[HintView]] = {}
    feedback: dict[TurnId, list[FeedbackView]] = {}
    # Mappings, as `index` is a method of rows.
    of_votes = select(VoteRow).where(VoteRow.judgement_id.in_(ids)).order_by(VoteRow.kind.desc(), VoteRow.index)
    for vote in (await connection.execute(of_votes)).mappings():
        answer = content.read_text(vote["raw"], "votes.raw", answer_row(*(vote[name] for name in ANSWER_KEY)))
        shown = VoteView(kind=vote["kind"], index=vote["index"], score=vote["score"], answer=answer)
        votes.setdefault(vote["judgement_id"], []).append(shown)
    of_hints = select(HintRow).where(HintRow.judgement_id.in_(ids)).order_by(HintRow.kind, HintRow.index)
    for row in (await connection.execute(of_hints)).mappings():
        place = answer_row(*(row[name] for name in ANSWER_KEY))
        hint = HintView(
            kind=row["kind"],
            index=row["index"],
            accepted=row["accepted"],
            text=content.read_text(row["text"], "hints.text", place),
            answer=content.read_text(row["raw"], "hints.raw", place),
        )
        hints.setdefault(row["judgement_id"], []).append(hint)
    for given in await read_feedback(connection, turns):
        feedback.setdefault(given.turn_id, []).append(given)
    decided = {TurnId(row.turn_id): row for row in judgements}
    return {turn: _judged(decided.get(turn), votes, hints, feedback.get(turn, [])) for turn in turns}


def _judged(
    judgement: Any,
    votes: dict[UUID, list[VoteView]],
    hints: dict[UUID, list[HintView]],
    feedback: list[FeedbackView],
) -> Judged:
    if judgement is None:
        return Judged(feedback=feedback)
    return Judged(
        recipe=judgement.recipe,
        revision=judgement.revision,
        verdict_why=judgement.verdict_why,
        hint_why=judgement.hint_why,
        votes=votes.get(judgement.id, []),
        hints=hints.get(judgement.id, []),
        feedback=feedback,
    )


def _clean(value: Any) -> Any:
    """The value, without what cannot be written as UTF-8: clients may send lone surrogates."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return _replaced(value)
    return value


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    if isinstance(value, dict):
        return {storable(key): _replaced(item) for key, item in value.items()}
    return value
