"""Finds a turn's session and parent, by the rules in clawloop.turns.

Reads only: a result stays right while the caller holds the lock on the session's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import SessionSource, TurnKind, TurnStatus
from clawloop.ids import SessionId, TurnId
from clawloop.turns.conversation import KnownPrefix, choose_session
from clawloop.turns.identify import named_session_id
from clawloop.turns.parents import Candidate, find_parent
from db.content import ContentCodec, content_of
from db.database import Raw
from db.tables import PrefixRole, TurnRow
from db.turns.prepared_turn import Request

_COMPLETED = {TurnStatus.COMPLETE, TurnStatus.LENGTH}

# The newest 16 of each hash decide: a greeting that thousands of conversations begin with must not cost thousands of
# rows.
_KNOWN_PREFIXES = text("""
    SELECT p.prefix_hash, p.turn_id, p.role, t.session_id, t.status
    FROM unnest(CAST(:hashes AS bytea[])) AS request(hash)
    CROSS JOIN LATERAL (
        SELECT * FROM session_prefixes
        WHERE api_key_id = :key AND prefix_hash = request.hash AND role IN ('request', 'reply')
          AND (CAST(:before AS uuid) IS NULL OR turn_id < :before)
        ORDER BY turn_id DESC LIMIT 16) AS p
    JOIN turns t ON t.id = p.turn_id
""")

# Of many requests at once; `n` is the request's place.
CANDIDATES = """
    SELECT r.n, t.id, t.kind, t.response_digest, t.reply_digest
    FROM unnest(%b::int[], %b::uuid[], %b::bytea[], %b::uuid[]) AS r(n, session_id, digest, before)
    JOIN turns t ON t.session_id = r.session_id AND t.response_digest = r.digest AND t.id < r.before
    ORDER BY t.id
"""


async def find_session(connection: AsyncConnection, request: Request) -> SessionId | None:
    """The session a request names or whose messages it continues; None if there is none."""
    if request.evidence.source is not SessionSource.CONVERSATION:
        return named_session_id(request.key, request.evidence)
    digests = content_of(connection).find_digests((*request.lookup.replies, request.lookup.whole))
    parameters = {"hashes": list(digests), "key": request.key, "before": request.before}
    rows = await connection.execute(_KNOWN_PREFIXES, parameters)
    prefixes = [
        KnownPrefix(
            digest=digests[row.prefix_hash],
            turn_id=TurnId(row.turn_id),
            session_id=SessionId(row.session_id),
            is_reply=row.role == PrefixRole.REPLY,
            completed=row.status in _COMPLETED,
        )
        for row in rows
    ]
    return choose_session(request.lookup, prefixes)


async def find_parent_turn(connection: AsyncConnection, session: SessionId, request: Request) -> TurnId | None:
    """The turn of this session that the request continues."""
    candidates = await parent_candidates(connection, session, request)
    return find_parent(request.seed, request.messages, candidates) if candidates else None


async def parent_candidates(connection: AsyncConnection, session: SessionId, request: Request) -> list[Candidate]:
    """The turns of this session, older than the request, that gave one of its replies."""
    content = content_of(connection)
    replies = content.find_digests(request.replies)
    if not replies:
        return []
    in_context = content.find_digests(request.lookup.replies)
    query = select(TurnRow.id, TurnRow.kind, TurnRow.response_digest, TurnRow.reply_digest).where(
        TurnRow.session_id == session, TurnRow.response_digest.in_(list(replies))
    )
    if request.before is not None:
        query = query.where(TurnRow.id < request.before)
    return [
        Candidate(
            turn_id=TurnId(row.id),
            kind=TurnKind(row.kind),
            response_digest=replies[row.response_digest],
            # One that the request does not hold stays in its stored form, and equals none of the request's.
            reply_digest=in_context.get(row.reply_digest, row.reply_digest),
        )
        for row in await connection.execute(query.order_by(TurnRow.id))
    ]


async def candidates_of_many(
    raw: Raw, content: ContentCodec, requests: Sequence[tuple[SessionId, Request]]
) -> list[list[Candidate]]:
    """`parent_candidates` of stored turns' requests and their sessions, in one statement.

    Args:
        requests: each with the turn that it became, in `before`.
    """
    candidates: list[list[Candidate]] = [[] for _ in requests]
    digests: dict[bytes, bytes] = {}  # by their stored forms
    rows: list[tuple[Any, ...]] = []
    for n, (session, request) in enumerate(requests):
        found = content.find_digests(request.replies)
        digests |= found | content.find_digests(request.lookup.replies)
        rows += [(n, session, stored, request.before) for stored in found]
    if rows:
        columns = [list(column) for column in zip(*rows, strict=True)]
        for n, turn_id, kind, response, reply in await (await raw.execute(CANDIDATES, columns)).fetchall():
            # One that no request holds stays in its stored form, and equals none of the requests'.
            known = digests.get(reply) or reply
            candidates[n].append(Candidate(TurnId(turn_id), TurnKind(kind), digests[response], known))
    return candidates
