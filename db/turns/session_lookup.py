"""Finds a turn's session and parent, by the rules in clawloop.turns.

Reads only: a result stays right while the caller holds the lock on the session's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import SessionSource, TurnKind, TurnStatus
from clawloop.ids import SessionId, TurnId
from clawloop.turns.conversation import KnownPrefix, choose_session
from clawloop.turns.identify import named_session_id
from clawloop.turns.parents import Candidate, find_parent
from db.content import ContentCodec, content_of
from db.database import Raw, raw_connection
from db.tables import PrefixRole
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

# For many requests at once; `n` is the request's place. The newest 16 turns that gave a reply in its context decide, or
# if none did, the newest 16 that gave the same reply alone: thousands of a session's turns may answer "done", and each
# later turn would cost thousands of rows. Rows are compared and ordered as their index has them, because with equal
# signs PostgreSQL may choose the index of the session's turns, and read all of them.
_NEWEST = """
    SELECT t.id, t.kind, t.response_digest, t.reply_digest FROM turns t
    WHERE (t.session_id, t.{digest}, t.id) < (r.session_id, r.{digest}, r.before)
        AND (t.session_id, t.{digest}) >= (r.session_id, r.{digest})
    ORDER BY t.session_id DESC, t.{digest} DESC, t.id DESC LIMIT 16
"""
CANDIDATES = f"""
    WITH asked AS (
        SELECT * FROM unnest(%b::int[], %b::uuid[], %b::uuid[], %b::bytea[], %b::bytea[])
            AS r(n, session_id, before, reply_digest, response_digest)),
    in_context AS (
        SELECT r.n, r.reply_digest AS prefix, found.*
        FROM asked r CROSS JOIN LATERAL ({_NEWEST.format(digest="reply_digest")}) found)
    SELECT n, id, kind, response_digest, reply_digest FROM in_context
    UNION
    SELECT r.n, found.* FROM (
        SELECT DISTINCT n, session_id, before, response_digest FROM asked a
        WHERE NOT EXISTS (SELECT FROM in_context c WHERE c.n = a.n AND c.prefix = a.reply_digest)) r
    CROSS JOIN LATERAL ({_NEWEST.format(digest="response_digest")}) found
"""
# Newer than every turn.
_NOW = UUID(int=2**128 - 1)


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
    raw = await raw_connection(connection)
    (candidates,) = await candidates_of_many(raw, content_of(connection), [(session, request)])
    return find_parent(request.seed, request.messages, candidates) if candidates else None


async def candidates_of_many(
    raw: Raw, content: ContentCodec, requests: Sequence[tuple[SessionId, Request]]
) -> list[list[Candidate]]:
    """For each request the older turns of its session that may have written one of its replies."""
    candidates: list[list[Candidate]] = [[] for _ in requests]
    asked = CandidateQuery(content, [(n, session, request) for n, (session, request) in enumerate(requests)])
    if asked.parameters:
        for n, candidate in asked.read(await (await raw.execute(CANDIDATES, asked.parameters)).fetchall()):
            candidates[n].append(candidate)
    return candidates


class CandidateQuery:
    """The parameters of `CANDIDATES`, and what its rows mean.

    Args:
        requests: each with its place and its session.

    Attributes:
        parameters: empty if no request holds a reply.
    """

    def __init__(self, content: ContentCodec, requests: Sequence[tuple[int, SessionId, Request]]) -> None:
        self._digests: dict[bytes, bytes] = {}  # by their stored forms
        rows: list[tuple[Any, ...]] = []
        for n, session, request in requests:
            for prefix, response in request.answers:
                prefixes, responses = content.find_digests([prefix]), content.find_digests([response])
                self._digests |= prefixes | responses
                before = request.before or _NOW
                rows += [(n, session, before, *stored) for stored in zip(prefixes, responses, strict=True)]
        self.parameters = [list(column) for column in zip(*rows, strict=True)]

    def read(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Candidate]]:
        """Each candidate with the place of its request."""
        for n, turn_id, kind, response, reply in rows:
            # A digest that no request holds stays in its stored form, and equals none of the requests'.
            digests = [self._digests.get(digest, digest) for digest in (response, reply)]
            yield n, Candidate(TurnId(turn_id), TurnKind(kind), *digests)
