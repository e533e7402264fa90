"""Reparents turns that were inserted before their parent, once the parent arrives, e.g. from a spool.

Their rows get another parent and another delta against it; the conversations they stand for stay the same.
"""

from __future__ import annotations

import logging

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import ContentUnreadable
from clawloop.ids import SessionId, TurnId
from db.tables import TurnRow
from db.turns.batch_rows import delta_columns
from db.turns.conversation_cache import ConversationCache
from db.turns.deltas import delta
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import evidence_from
from db.turns.session_lookup import find_parent_turn

log = logging.getLogger(__name__)


async def reparent_late_turns(
    connection: AsyncConnection, conversations: ConversationCache, prepared: PreparedTurn, session: SessionId
) -> None:
    """Make a turn just inserted the parent of the turns that continue it; the session's row must be locked."""
    parent = prepared.record.turn_id
    if prepared.response_digest is None:
        return
    later = (
        select(TurnRow.id, TurnRow.group_id, TurnRow.evidence)
        .where(TurnRow.session_id == session, TurnRow.id > parent, TurnRow.outcome != TurnOutcome.ERASED)
        .where(or_(TurnRow.parent_turn_id.is_(None), TurnRow.parent_turn_id < parent))
        .order_by(TurnRow.id)
    )
    for row in (await connection.execute(later)).all():
        try:
            conversation = await conversations.load(connection, TurnId(row.id))
        except ContentUnreadable as error:  # what it continues is not known any more
            log.warning("turn unreadable, its parent not looked for", extra={"turn_id": str(row.id), "why": str(error)})
            continue
        request = Request(
            key=prepared.record.api_key_id,
            evidence=evidence_from(row.evidence),
            messages=conversation.request(),
            before=TurnId(row.group_id or row.id),
        )
        if (
            prepared.response_digest not in request.replies
            and prepared.request.history.whole not in request.history.asked
        ):
            continue
        found = await find_parent_turn(connection, session, request)
        if found is None or found[0] != parent:
            continue
        stored = delta(conversation, prepared.conversation)
        await connection.execute(
            update(TurnRow)
            .where(TurnRow.id == row.id)
            .values(
                parent_turn_id=parent,
                matched_by=found[1].value,
                **delta_columns(stored, prepared.content, TurnId(row.id)),
            )
        )
