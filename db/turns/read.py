"""Reads a stored turn back as it was inserted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import (
    MatchedBy,
    SessionEvidence,
    SessionSource,
    StoredTurn,
    TurnKind,
    TurnOutcome,
    TurnRecord,
    TurnStatus,
)
from clawloop.ids import ApiKeyId, EpisodeId, SessionId, TurnId
from db.arrays import bytes_to_ids, bytes_to_logprobs
from db.content import ContentCodec, content_of
from db.tables import SessionRow, ToolListRow, TurnRow
from db.turns.conversation_cache import ConversationCache
from db.turns.deltas import Conversation

_TURN = (
    select(TurnRow.__table__, SessionRow.policy, SessionRow.api_key_id, ToolListRow.tools)
    .join(SessionRow, SessionRow.id == TurnRow.session_id)
    .outerjoin(ToolListRow, ToolListRow.sha256 == TurnRow.tools_sha256)
)


async def read_turn(
    connection: AsyncConnection, conversations: ConversationCache, turn_id: TurnId
) -> StoredTurn | None:
    row = (await connection.execute(_TURN.where(TurnRow.id == turn_id))).mappings().one_or_none()
    if row is None:
        return None
    if row["outcome"] == TurnOutcome.ERASED:
        conversations.discard(turn_id)
    return stored_turn(row, await conversations.load(connection, turn_id), content_of(connection))


def stored_turn(row: RowMapping | Mapping[str, Any], conversation: Conversation, content: ContentCodec) -> StoredTurn:
    """
    Args:
        row: the turn's columns, `policy` and `api_key_id` of its session, and `tools` of its list.
    """
    return StoredTurn(
        record=_record(row, conversation, content),
        session_id=SessionId(row["session_id"]),
        parent_turn_id=_turn_id(row["parent_turn_id"]),
        outcome=TurnOutcome(row["outcome"]),
        outcome_detail=row["outcome_detail"],
        announced_at=row["announced_at"],
        matched_by=None if row["matched_by"] is None else MatchedBy(row["matched_by"]),
    )


def evidence_from(stored: dict[str, Any]) -> SessionEvidence:
    return SessionEvidence(SessionSource(stored["source"]), stored["value"], tuple(stored["narrowing"]))


def _record(row: RowMapping | Mapping[str, Any], conversation: Conversation, content: ContentCodec) -> TurnRecord:
    response_ids = None if conversation.response_ids is None else bytes_to_ids(conversation.response_ids)
    logprobs = content.read_bytes(row["logprobs"], "turns.logprobs", row["id"])
    tools = row["tools"]
    if tools is not None:
        tools = content.read_json(tools, "tool_lists.tools", row["tools_sha256"].hex())
    return TurnRecord(
        turn_id=TurnId(row["id"]),
        group_id=_turn_id(row["group_id"]),
        choice=row["choice"],
        api_key_id=ApiKeyId(row["api_key_id"]),
        policy=row["policy"],
        alias=row["alias"],
        evidence=evidence_from(row["evidence"]),
        kind=TurnKind(row["kind"]),
        kind_reason=row["kind_reason"],
        status=TurnStatus(row["status"]),
        error=content.read_text(row["error"], "turns.error", row["id"]),
        version=row["version"],
        engine_id=row["engine_id"],
        messages=conversation.request(),
        tools=tools,
        response=conversation.reply(),
        prompt_ids=None if conversation.prompt_ids is None else bytes_to_ids(conversation.prompt_ids),
        response_ids=response_ids,
        logprobs=None if logprobs is None else bytes_to_logprobs(logprobs, len(response_ids or ())),
        sampling=content.read_json(row["sampling"], "turns.sampling", row["id"]),
        finish_reason=row["finish_reason"],
        ends_session=row["ends_session"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        episode_id=None if row["episode_id"] is None else EpisodeId(row["episode_id"]),
    )


def _turn_id(stored: Any) -> TurnId | None:
    return None if stored is None else TurnId(stored)
