"""Finds the sessions of a batch's turns, by the rules in clawloop.turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from clawloop.contracts.turns import MatchedBy, SessionSource, TurnStatus
from clawloop.ids import SessionId, TurnId
from clawloop.turns.conversation import KnownPrefix, choose_session
from clawloop.turns.identify import conversation_session_id, named_session_id
from clawloop.turns.parents import Candidate
from db.database import Raw
from db.tables import PrefixRole
from db.turns.deltas import Conversation
from db.turns.prepared_turn import PreparedTurn
from db.turns.session_lookup import find_session_by_place

# A batch waits this long for a row that another transaction holds; then its turns are inserted one by one, and only the
# one that needs the row waits on.
_BATCH_LOCK_MILLISECONDS = 100

_LIMIT_LOCK_WAIT = f"SELECT set_config('lock_timeout', '{_BATCH_LOCK_MILLISECONDS}ms', true)"
_LOCK_CONVERSATIONS = "SELECT pg_advisory_xact_lock(key) FROM unnest(%s::bigint[]) key"
# The newest 16 of each hash decide: a greeting that thousands of conversations begin with must not cost thousands of
# rows. A reply that a later turn expects is that of a late turn.
_KNOWN_PREFIXES = """
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
_COMPLETED = {TurnStatus.COMPLETE, TurnStatus.LENGTH}

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
                rows = await raw.execute(_KNOWN_PREFIXES, _prefix_parameters(nameless, digests))
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
