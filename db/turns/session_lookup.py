"""Where a turn belongs: its session and its parent, by the rules in clawloop.turns.

Only looks; what it finds is right as long as the caller holds the session's row, or needs no more than a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import SessionSource, TurnKind, TurnStatus
from clawloop.ids import SessionId, TurnId
from clawloop.turns.conversation import KnownPrefix, choose_session
from clawloop.turns.identify import conversation_session_id, named_session_id
from clawloop.turns.parents import Candidate, find_parent
from db.tables import PrefixRole, TurnRow
from db.turns.prepared_turn import PreparedTurn, Request

_COMPLETED = {TurnStatus.COMPLETE, TurnStatus.LENGTH}

# The newest few of each hash decide. A greeting that thousands of conversations begin with must not cost thousands
# of rows.
_KNOWN_PREFIXES = text("""
    SELECT p.prefix_hash, p.turn_id, p.role, t.session_id, t.status
    FROM unnest(CAST(:hashes AS bytea[])) AS wanted(hash)
    CROSS JOIN LATERAL (
        SELECT * FROM session_prefixes
        WHERE api_key_id = :key AND prefix_hash = wanted.hash AND role IN ('request', 'reply')
          AND (CAST(:before AS uuid) IS NULL OR turn_id < :before)
        ORDER BY turn_id DESC LIMIT 16) AS p
    JOIN turns t ON t.id = p.turn_id
""")

_EXPECTING_SESSION = text("""
    SELECT t.session_id FROM session_prefixes p JOIN turns t ON t.id = p.turn_id
    WHERE p.api_key_id = :key AND p.prefix_hash = :hash AND p.role = :role
    ORDER BY p.turn_id LIMIT 1
""")


async def known_session(connection: AsyncConnection, request: Request) -> SessionId | None:
    """The session these messages name or continue; None if they continue none."""
    if request.evidence.source is not SessionSource.CONVERSATION:
        return named_session_id(request.key, request.evidence)
    hashes = [*request.lookup.replies, request.lookup.whole]
    parameters = {"hashes": hashes, "key": request.key, "before": request.before}
    rows = await connection.execute(_KNOWN_PREFIXES, parameters)
    known = [
        KnownPrefix(
            digest=row.prefix_hash,
            turn_id=TurnId(row.turn_id),
            session_id=SessionId(row.session_id),
            is_reply=row.role == PrefixRole.REPLY,
            completed=row.status in _COMPLETED,
        )
        for row in rows
    ]
    return choose_session(request.lookup, known)


async def session_for(connection: AsyncConnection, entry: PreparedTurn) -> tuple[SessionId, bool]:
    """The session a turn belongs to, and whether its messages alone found no earlier one."""
    if (known := await known_session(connection, entry.request)) is not None:
        return known, False
    if entry.reply_digest is not None:
        # Entered late: what came after it is here already and waits for it.
        parameters = {"key": entry.record.api_key_id, "hash": entry.reply_digest, "role": PrefixRole.EXPECTED}
        expecting = await connection.scalar(_EXPECTING_SESSION, parameters)
        if expecting is not None:
            return SessionId(expecting), True
    return conversation_session_id(entry.first_choice), True


async def parent_in(connection: AsyncConnection, session: SessionId, request: Request) -> TurnId | None:
    """The turn of this session that the request continues."""
    candidates = await candidates_in(connection, session, request.replies, request.before)
    return find_parent(request.seed, request.messages, candidates) if candidates else None


async def candidates_in(
    connection: AsyncConnection, session: SessionId, replies: Sequence[bytes], before: TurnId | None
) -> list[Candidate]:
    """The turns of this session, older than `before`, that gave one of these replies."""
    if not replies:
        return []
    query = select(TurnRow.id, TurnRow.kind, TurnRow.response_digest, TurnRow.reply_digest).where(
        TurnRow.session_id == session, TurnRow.response_digest.in_(replies)
    )
    if before is not None:
        query = query.where(TurnRow.id < before)
    return [
        Candidate(
            turn_id=TurnId(row.id),
            kind=TurnKind(row.kind),
            response_digest=row.response_digest,
            reply_digest=row.reply_digest,
        )
        for row in await connection.execute(query.order_by(TurnRow.id))
    ]
