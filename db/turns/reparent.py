"""Turns that were entered before one they continue: a spooled turn comes after those that followed it.

Knows nothing about why it came late. The later turns change their parent and what they store against it, never
what they say.
"""

from __future__ import annotations

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import SessionId, TurnId
from db.tables import TurnRow
from db.turns.conversation_cache import ConversationCache
from db.turns.deltas import delta
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import evidence_from
from db.turns.session_lookup import parent_in


async def reparent_late_turns(
    connection: AsyncConnection, conversations: ConversationCache, entry: PreparedTurn, session: SessionId
) -> None:
    """Make this turn, just entered, the parent of those that continue it; the session's row must be held."""
    parent = entry.record.turn_id
    if entry.response_digest is None:
        return
    later = (
        select(TurnRow.id, TurnRow.group_id, TurnRow.evidence)
        .where(TurnRow.session_id == session, TurnRow.id > parent, TurnRow.outcome != TurnOutcome.ERASED)
        .where(or_(TurnRow.parent_turn_id.is_(None), TurnRow.parent_turn_id < parent))
        .order_by(TurnRow.id)
    )
    for row in (await connection.execute(later)).all():
        conversation = await conversations.conversation(connection, TurnId(row.id))
        request = Request(
            key=entry.record.api_key_id,
            evidence=evidence_from(row.evidence),
            messages=conversation.request(),
            before=TurnId(row.group_id or row.id),
        )
        if entry.response_digest not in request.replies:
            continue
        if await parent_in(connection, session, request) != parent:
            continue
        stored = delta(conversation, entry.conversation)
        await connection.execute(
            update(TurnRow)
            .where(TurnRow.id == row.id)
            .values(
                parent_turn_id=parent,
                messages_kept=stored.messages_kept,
                messages_added=f"[{','.join(stored.messages_added)}]",
                prompt_shared=stored.prompt_shared,
                prompt_ids=stored.prompt_ids,
            )
        )
