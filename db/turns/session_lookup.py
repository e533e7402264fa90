"""Finds sessions and parents of turns, of one or of a batch, by the rules in clawloop.core.turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import MatchedBy, Message, SessionSource, TurnKind, TurnStatus
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.turns.conversation import ASKED_ALIKE, KnownPrefix, choose_session, choose_session_by_place
from clawloop.core.turns.identify import conversation_session_id, named_session_id
from clawloop.core.turns.parents import Candidate, find_parent, may_be_placed
from clawloop.core.turns.places import AskedTurn, Placed, PlacedReply, find_places
from db.content import ContentCodec, content_of
from db.database import Raw, raw_connection
from db.tables import PrefixRole
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import Conversation

# One turn -------------------------------------------------------------------------------------------------------------
# Finds a turn's session and parent, by the rules in clawloop.core.turns.
#
# Reads only: a result stays right while the caller holds the lock on the session's row.

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
    SELECT t.id, t.kind, t.response_digest, t.reply_digest, t.asked_digest FROM turns t
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
    SELECT n, id, kind, response_digest, reply_digest, asked_digest FROM in_context
    UNION
    SELECT r.n, found.* FROM (
        SELECT DISTINCT n, session_id, before, response_digest FROM asked a
        WHERE NOT EXISTS (SELECT FROM in_context c WHERE c.n = a.n AND c.prefix = a.reply_digest)) r
    CROSS JOIN LATERAL ({_NEWEST.format(digest="response_digest")}) found
"""
# The requests of the newest turns with a reply, read only where a request's last reply is not found as it was given.
# Bounded in bytes as well, which PostgreSQL knows without reading the replies. None where no place can be found: the
# first reply that is found stands right after messages that are as received. So a client that changes its first message
# in each request does not have all replies read each time.
MOST_ASKED = 512
MOST_ASKED_BYTES = 4 * 2**20
_ASKED = """
    WITH newest AS MATERIALIZED (
        SELECT id, kind, asked_digest, response, status FROM turns
        WHERE session_id = %b AND id < %b AND asked_digest IS NOT NULL AND response IS NOT NULL
        ORDER BY id DESC LIMIT %b)
    SELECT id, kind, asked_digest, response, status FROM (
        SELECT *, sum(pg_column_size(response)) OVER (ORDER BY id DESC) AS bytes FROM newest) measured
    WHERE bytes <= %b AND EXISTS (SELECT FROM newest WHERE asked_digest = ANY(%b::bytea[])) ORDER BY id DESC
"""
_ASKED_BY_ANY = f"""
    SELECT asked.hash, found.id, found.session_id, found.response, found.status
    FROM unnest(%b::bytea[]) AS asked(hash) CROSS JOIN LATERAL (
        SELECT t.id, t.session_id, t.response, t.status FROM session_prefixes p JOIN turns t ON t.id = p.turn_id
        WHERE p.api_key_id = %b AND p.prefix_hash = asked.hash AND p.role = 'request' AND p.turn_id < %b
            AND t.asked_digest IS NOT NULL AND t.response IS NOT NULL
        ORDER BY p.turn_id DESC LIMIT {ASKED_ALIKE}) found
"""
# Newer than every turn.
_NOW = UUID(int=2**128 - 1)


async def find_session(connection: AsyncConnection, request: Request) -> SessionId | None:
    """The session a request names or whose messages it continues; None if there is none."""
    if request.evidence.source is not SessionSource.CONVERSATION:
        return named_session_id(request.key, request.evidence)
    digests = content_of(connection).find_digests((*request.history.replies, request.history.whole))
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
    if (session := choose_session(request.history, prefixes)) is not None:
        return session
    return await find_session_by_place(await raw_connection(connection), content_of(connection), request)


async def find_session_by_place(raw: Raw, content: ContentCodec, request: Request) -> SessionId | None:
    """The session of the turn whose reply stands in the request in other words; asks nothing without a reply."""
    if not request.history.alone:
        return None
    digests = content.find_digests(request.history.asked)
    rows = await raw.execute(_ASKED_BY_ANY, [list(digests), request.key, request.before or _NOW])
    asked: dict[bytes, list[tuple[SessionId, Message, bool]]] = defaultdict(list)
    for stored, turn_id, session, response, status in await rows.fetchall():
        reply = content.read_json(response, "turns.response", turn_id)
        asked[digests[stored]].append((SessionId(session), reply, status in _COMPLETED))
    return choose_session_by_place(request.history, asked)


async def find_places_in(connection: AsyncConnection, session: SessionId, request: Request) -> Placed:
    """The replies of this session that stand in the request in other words."""
    content = content_of(connection)
    raw = await raw_connection(connection)
    received = list(content.find_digests(request.history.asked))
    rows = await raw.execute(_ASKED, [session, request.before or _NOW, MOST_ASKED, MOST_ASKED_BYTES, received])
    turns = [
        AskedTurn(
            TurnId(turn_id),
            TurnKind(kind),
            asked,
            content.read_json(response, "turns.response", turn_id),
            ended=status in _COMPLETED,
        )
        for turn_id, kind, asked, response, status in await rows.fetchall()
    ]
    return find_places(request.history, turns, lambda digest: content.find_digests([digest]))


async def find_parent_turn(
    connection: AsyncConnection, session: SessionId, request: Request
) -> tuple[TurnId, MatchedBy] | None:
    """The turn of this session that the request continues, and how it was found."""
    raw = await raw_connection(connection)
    (candidates,) = await candidates_of_many(raw, content_of(connection), [(session, request)])
    placed: Sequence[PlacedReply] = ()
    if may_be_placed(request.history, candidates):
        placed = (await find_places_in(connection, session, request)).replies
    return find_parent(request.history, candidates, placed)


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
        for n, turn_id, kind, response, reply, asked in rows:
            # A digest that no request holds stays in its stored form, and equals none of the requests'.
            response, reply = (self._digests.get(digest, digest) for digest in (response, reply))
            yield n, Candidate(TurnId(turn_id), TurnKind(kind), response, reply, asked)


# A batch --------------------------------------------------------------------------------------------------------------
# Finds the sessions of a batch's turns, by the rules in clawloop.core.turns.

# A batch waits this long for a row that another transaction holds; then its turns are inserted one by one, and only the
# one that needs the row waits on.
_BATCH_LOCK_MILLISECONDS = 100

_LIMIT_LOCK_WAIT = f"SELECT set_config('lock_timeout', '{_BATCH_LOCK_MILLISECONDS}ms', true)"
_LOCK_CONVERSATIONS = "SELECT pg_advisory_xact_lock(key) FROM unnest(%s::bigint[]) key"
# The newest 16 of each hash decide: a greeting that thousands of conversations begin with must not cost thousands of
# rows. A reply that a later turn expects is that of a late turn.
_KNOWN_PREFIXES_OF_BATCH = """
    SELECT r.n, p.prefix_hash, p.turn_id, p.role, t.session_id, t.status
    FROM unnest(%b::int[], %b::uuid[], %b::bytea[], %b::uuid[]) AS r(n, key, hash, before)
    CROSS JOIN LATERAL (
        SELECT prefix_hash, turn_id, role FROM session_prefixes
        WHERE api_key_id = r.key AND prefix_hash = r.hash AND role IN ('request', 'reply') AND turn_id < r.before
        ORDER BY turn_id DESC LIMIT 16) p
    JOIN turns t ON t.id = p.turn_id
    UNION ALL
    SELECT r.n, p.prefix_hash, p.turn_id, p.role, t.session_id, t.status
    FROM unnest(%b::int[], %b::uuid[], %b::bytea[]) AS r(n, key, hash)
    CROSS JOIN LATERAL (
        SELECT prefix_hash, turn_id, role FROM session_prefixes
        WHERE api_key_id = r.key AND prefix_hash = r.hash AND role = 'expected' ORDER BY turn_id LIMIT 1) p
    JOIN turns t ON t.id = p.turn_id
"""

ERASED = "erased"


@dataclass(slots=True, eq=False)
class Entry:
    """One turn of the batch, as far as it is known.

    Args:
        n: place in the batch.
        unmatched: neither a name nor an earlier turn identified the session.
        opens_session: the session's row was inserted with this turn.
        asked: digest of the request as matched; None where that is as received.
    """

    n: int
    prepared: PreparedTurn
    session: SessionId
    unmatched: bool
    erased_at: datetime | None = None
    opens_session: bool = False
    special: set[str] = field(default_factory=set)
    candidates: list[Candidate] = field(default_factory=list)
    parent: TurnId | None = None
    matched_by: MatchedBy | None = None
    asked: bytes | None = None
    parent_conversation: Conversation | None = None

    @property
    def was_erased(self) -> bool:
        erased = self.erased_at is not None and self.prepared.record.started_at <= self.erased_at
        return erased or ERASED in self.special


async def assign_sessions(raw: Raw, turns: Sequence[PreparedTurn]) -> list[Entry]:
    nameless = [(n, turn) for n, turn in enumerate(turns) if turn.record.evidence.source is SessionSource.CONVERSATION]
    known: dict[int, list[KnownPrefix]] = defaultdict(list)
    expected: dict[int, SessionId] = {}
    digests: dict[bytes, bytes] = {}  # by their stored forms
    rows = None
    if len(turns) > 1 or nameless:
        async with raw.pipeline():
            if len(turns) > 1:
                await raw.execute(_LIMIT_LOCK_WAIT)
            if nameless:
                locks = {int.from_bytes(turn.request.history.root[:8], signed=True) for _, turn in nameless}
                await raw.execute(_LOCK_CONVERSATIONS, [sorted(locks)])
                rows = await raw.execute(_KNOWN_PREFIXES_OF_BATCH, _prefix_parameters(nameless, digests))
        if rows is not None:
            for n, stored, turn_id, role, session, status in await rows.fetchall():
                if role == PrefixRole.EXPECTED:
                    expected[n] = SessionId(session)
                else:
                    is_reply, completed = role == PrefixRole.REPLY, status in _COMPLETED
                    known[n].append(
                        KnownPrefix(digests[stored], TurnId(turn_id), SessionId(session), is_reply, completed)
                    )
    entries = []
    for n, turn in enumerate(turns):
        request = turn.request
        if request.evidence.source is not SessionSource.CONVERSATION:
            entries.append(Entry(n, turn, named_session_id(request.key, request.evidence), unmatched=False))
            continue
        session = choose_session(request.history, known[n])
        if session is None:
            session = await find_session_by_place(raw, turn.content, request)
        if session is not None:
            entries.append(Entry(n, turn, session, unmatched=False))
        else:
            # A late turn is expected: the turns after it are here already.
            session = expected.get(n) or conversation_session_id(turn.first_choice)
            entries.append(Entry(n, turn, session, unmatched=True))
    return entries


def _prefix_parameters(nameless: Sequence[tuple[int, PreparedTurn]], digests: dict[bytes, bytes]) -> list[list[Any]]:
    """The parameters of `_KNOWN_PREFIXES`; adds the digests by their stored forms."""
    hashes: list[tuple[Any, ...]] = []
    replies: list[tuple[Any, ...]] = []
    for n, turn in nameless:
        found = turn.content.find_digests((*turn.request.history.replies, turn.request.history.whole))
        digests |= found
        hashes += [(n, turn.request.key, stored, turn.first_choice) for stored in found]
        if turn.reply_digest is not None:
            replies += [(n, turn.request.key, stored) for stored in turn.content.find_digests([turn.reply_digest])]
    return [*columns_of(hashes, 4), *columns_of(replies, 3)]


def columns_of(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
