"""Reads stored turns and conversations back as they were inserted, from what each turn added."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from cachetools import LRUCache
from sqlalchemy import RowMapping, literal_column, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.turns import (
    MatchedBy,
    Message,
    SessionEvidence,
    SessionSource,
    StoredTurn,
    TurnKind,
    TurnOutcome,
    TurnRecord,
    TurnStatus,
)
from clawloop.core.ids import ApiKeyId, EpisodeId, LessonId, SessionId, TurnId
from db.content import ID_BYTES, ContentCodec, bytes_to_ids, bytes_to_logprobs, content_of, exact_json, shared_ids
from db.tables import SessionRow, ToolListRow, TurnRow

# Deltas ---------------------------------------------------------------------------------------------------------------
# Splits a turn into what it shares with its parent and what it adds, so that storage grows with a conversation's
# length and not with its square.
#
# Sharing is exact, JSON text for text and id for id: messages that are merely equivalent are stored again.


@dataclass(frozen=True, slots=True)
class Conversation:
    """The parts of a turn that a later turn may share.

    Args:
        messages: of the request, each as its exact JSON text.
        response: likewise; None if there was no reply.
        prompt_ids, response_ids: encoded by db.content; None if unknown.
        tools_sha256: key of the request's tool list; None if it had none.
        lessons: that the prompt held. Turns share tokens of their prompts only with the same lessons, so that the
            prompts with a lesson can be erased and no other one lacks anything.
    """

    messages: tuple[str, ...]
    response: str | None
    prompt_ids: bytes | None
    response_ids: bytes | None
    tools_sha256: bytes | None
    lessons: tuple[UUID, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return self.messages if self.response is None else (*self.messages, self.response)

    @property
    def tokens(self) -> bytes:
        return (self.prompt_ids or b"") + (self.response_ids or b"")

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, as if nothing were shared."""
        # One character outside Latin-1 makes every character of a text take two or four bytes.
        tokens = len(self.prompt_ids or b"") + len(self.response_ids or b"")
        return sum(map(sys.getsizeof, self.texts)) + tokens

    def request(self) -> list[Message]:
        return [json.loads(text) for text in self.messages]

    def reply(self) -> Message | None:
        return None if self.response is None else json.loads(self.response)


@dataclass(frozen=True, slots=True)
class Delta:
    """
    Args:
        messages_kept: number of the parent's texts the request begins with.
        messages_added: the texts after those.
        prompt_shared: number of the parent's tokens the prompt begins with; None exactly when `prompt_ids` is None.
        prompt_ids: the ids after those; None if the prompt's ids are unknown.
    """

    messages_kept: int
    messages_added: tuple[str, ...]
    prompt_shared: int | None
    prompt_ids: bytes | None

    def rebuilt_messages(self, parent: Conversation | None) -> tuple[str, ...]:
        kept = () if parent is None else parent.texts[: self.messages_kept]
        return (*kept, *self.messages_added)

    def rebuilt_prompt_ids(self, parent: Conversation | None) -> bytes | None:
        if self.prompt_ids is None or not parent or not self.prompt_shared:
            return self.prompt_ids
        return parent.tokens[: self.prompt_shared * ID_BYTES] + self.prompt_ids


def delta(conversation: Conversation, parent: Conversation | None) -> Delta:
    """The part of `conversation` to store when `parent` is stored."""
    kept = 0 if parent is None else _equal_from_start(parent.texts, conversation.messages)
    prompt = conversation.prompt_ids
    shared = None
    if prompt is not None:
        is_alike = parent is not None and parent.lessons == conversation.lessons
        shared = shared_ids(parent.tokens, prompt) if parent is not None and is_alike else 0
        prompt = prompt[shared * ID_BYTES :]
    return Delta(kept, conversation.messages[kept:], shared, prompt)


def _equal_from_start(left: Sequence[str], right: Sequence[str]) -> int:
    count = 0
    for left_text, right_text in zip(left, right, strict=False):
        if left_text != right_text:
            break
        count += 1
    return count


# Conversations --------------------------------------------------------------------------------------------------------
# Rebuilds conversations from what each turn added, and caches them in memory.
#
# A turn's conversation never changes once inserted, even if its parent does: entries are only evicted for room, or
# discarded when the turn was erased.

_CHAIN = text("""
    WITH RECURSIVE chain AS (
        SELECT 0 AS depth, t.* FROM turns t WHERE t.id = :turn_id
        UNION ALL
        SELECT c.depth + 1, t.* FROM chain c JOIN turns t ON t.id = c.parent_turn_id
        WHERE c.messages_kept > 0 OR c.prompt_shared > 0)
    SELECT id, parent_turn_id, messages_kept, messages_added, response, prompt_shared, prompt_ids, response_ids,
        tools_sha256, lessons
    FROM chain ORDER BY depth DESC
""")


class ConversationCache:
    """
    Args:
        cache_bytes: approximate limit of the cache, see `clawloop.core.settings.Settings.conversation_cache_mib`.
    """

    def __init__(self, cache_bytes: int = 256 * 2**20) -> None:
        self._cache: LRUCache[TurnId, Conversation] = LRUCache(cache_bytes, getsizeof=lambda entry: entry.size_bytes)

    def put(self, turn_id: TurnId, conversation: Conversation) -> None:
        if conversation.size_bytes <= self._cache.maxsize:
            self._cache[turn_id] = conversation

    def discard(self, turn_id: TurnId) -> None:
        self._cache.pop(turn_id, None)

    def drop_erased(self, row: RowMapping | Mapping[str, Any]) -> None:
        """Discard a turn's conversation if its row says that the turn, or a lesson in its prompt, was erased."""
        if row["outcome"] == TurnOutcome.ERASED or (row["lessons"] and row["prompt_ids"] is None):
            self.discard(TurnId(row["id"]))

    async def load(self, connection: AsyncConnection, turn_id: TurnId) -> Conversation:
        """A turn's conversation: from the cache, or rebuilt from its ancestors in one query.

        Raises:
            LookupError: there is no such turn.
        """
        if (cached := self._cache.get(turn_id)) is not None:
            return cached
        conversation = parent = None
        for row in (await connection.execute(_CHAIN, {"turn_id": turn_id})).mappings():
            if conversation is not None:
                parent = (TurnId(row["parent_turn_id"]), conversation)
            conversation = _continued(conversation, row, content_of(connection))
        if conversation is None:
            raise LookupError(f"no turn {turn_id}")
        if parent is not None:
            # The next to be loaded: a judge needs the turn that this one follows.
            self.put(*parent)
        self.put(turn_id, conversation)
        return conversation

    async def of_row(self, connection: AsyncConnection, row: Mapping[str, Any]) -> Conversation:
        """The conversation of a turn whose row was read: as `load`, and without a query if its parent's is cached.

        Args:
            row: with the columns that say what the turn adds to its parent, and its outcome.
        """
        turn_id = TurnId(row["id"])
        self.drop_erased(row)
        if (cached := self._cache.get(turn_id)) is not None:
            return cached
        shares = row["messages_kept"] > 0 or bool(row["prompt_shared"])
        parent = self._cache.get(TurnId(row["parent_turn_id"])) if shares else None
        if shares and parent is None:
            return await self.load(connection, turn_id)
        conversation = _continued(parent, row, content_of(connection))
        self.put(turn_id, conversation)
        return conversation


def _continued(parent: Conversation | None, row: RowMapping | Mapping[str, Any], content: ContentCodec) -> Conversation:
    turn = row["id"]
    added = content.read_json(row["messages_added"], "turns.messages_added", turn)
    stored = Delta(
        messages_kept=row["messages_kept"],
        messages_added=tuple(exact_json(message) for message in added),
        prompt_shared=row["prompt_shared"],
        prompt_ids=content.read_bytes(row["prompt_ids"], "turns.prompt_ids", turn),
    )
    response = content.read_json(row["response"], "turns.response", turn)
    return Conversation(
        messages=stored.rebuilt_messages(parent),
        response=None if response is None else exact_json(response),
        prompt_ids=stored.rebuilt_prompt_ids(parent),
        response_ids=content.read_bytes(row["response_ids"], "turns.response_ids", turn),
        tools_sha256=row["tools_sha256"],
        lessons=tuple(row["lessons"] or ()),
    )


# Turns ----------------------------------------------------------------------------------------------------------------
# Reads a stored turn back as it was inserted.

# Empty where a lesson was erased.
LESSON_TEXTS = """CASE WHEN t.lessons IS NOT NULL THEN ARRAY(
        SELECT coalesce(l.text, '') FROM unnest(t.lessons) WITH ORDINALITY AS shown (id, place)
            LEFT JOIN lessons l ON l.id = shown.id
        ORDER BY shown.place) END"""
"""SQL: the texts of a turn's lessons, in their order; NULL if it had none."""

_TURN = (
    select(
        TurnRow.__table__,
        SessionRow.policy,
        SessionRow.api_key_id,
        ToolListRow.tools,
        literal_column(LESSON_TEXTS.replace("t.lessons", "turns.lessons")).label("lesson_texts"),
    )
    .join(SessionRow, SessionRow.id == TurnRow.session_id)
    .outerjoin(ToolListRow, ToolListRow.sha256 == TurnRow.tools_sha256)
)


async def read_turn(
    connection: AsyncConnection, conversations: ConversationCache, turn_id: TurnId
) -> StoredTurn | None:
    row = (await connection.execute(_TURN.where(TurnRow.id == turn_id))).mappings().one_or_none()
    if row is None:
        return None
    conversations.drop_erased(row)
    return stored_turn(row, await conversations.load(connection, turn_id), content_of(connection))


def stored_turn(row: RowMapping | Mapping[str, Any], conversation: Conversation, content: ContentCodec) -> StoredTurn:
    """
    Args:
        row: the turn's columns, `policy` and `api_key_id` of its session, `tools` of its list, and `lesson_texts`.
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
    return SessionEvidence(
        SessionSource(stored["source"]), stored["value"], tuple(stored["narrowing"]), stored["policy"]
    )


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
        lessons=shown_lessons(row["lessons"], row["lesson_texts"], content),
    )


def shown_lessons(
    lessons: Sequence[UUID] | None, texts: Sequence[str] | None, content: ContentCodec
) -> tuple[ShownLesson, ...]:
    """A turn's lessons with their texts, as LESSON_TEXTS has them."""
    return tuple(
        ShownLesson(LessonId(lesson), content.read_text(said, "lessons.text", lesson))
        for lesson, said in zip(lessons or (), texts or (), strict=True)
    )


def _turn_id(stored: Any) -> TurnId | None:
    return None if stored is None else TurnId(stored)
