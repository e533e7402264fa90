"""Rebuilds conversations from what each turn added, and caches them in memory.

A turn's conversation never changes once inserted, even if its parent does: entries are only evicted for room, or
discarded when the turn was erased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachetools import LRUCache
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import TurnId
from db.content import ContentCodec, content_of
from db.exact_json import exact_json
from db.turns.deltas import Conversation, Delta

_CHAIN = text("""
    WITH RECURSIVE chain AS (
        SELECT 0 AS depth, t.* FROM turns t WHERE t.id = :turn_id
        UNION ALL
        SELECT c.depth + 1, t.* FROM chain c JOIN turns t ON t.id = c.parent_turn_id
        WHERE c.messages_kept > 0 OR c.prompt_shared > 0)
    SELECT id, parent_turn_id, messages_kept, messages_added, response, prompt_shared, prompt_ids, response_ids,
        tools_sha256
    FROM chain ORDER BY depth DESC
""")


class ConversationCache:
    """
    Args:
        cache_bytes: approximate limit of the cache, see `clawloop.settings.Settings.conversation_cache_mib`.
    """

    def __init__(self, cache_bytes: int = 256 * 2**20) -> None:
        self._cache: LRUCache[TurnId, Conversation] = LRUCache(cache_bytes, getsizeof=lambda entry: entry.size_bytes)

    def put(self, turn_id: TurnId, conversation: Conversation) -> None:
        if conversation.size_bytes <= self._cache.maxsize:
            self._cache[turn_id] = conversation

    def discard(self, turn_id: TurnId) -> None:
        self._cache.pop(turn_id, None)

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
        if row["outcome"] == TurnOutcome.ERASED:
            self.discard(turn_id)
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
    )
