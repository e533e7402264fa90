"""Inserts turns of different sessions in one transaction, in a handful of statements whatever their number.

Locks, in this order: the conversations without a name (advisory, by what they begin with), then the sessions' rows by
id. So turns of one conversation are inserted one after the other, each sees all earlier ones, and two transactions
never wait for each other. The statements go to psycopg directly, in pipelines: with SQLAlchemy each takes several times
the CPU, and each chat pays for it. What is rare (an erased turn, a late parent) uses the shared functions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import InsertedTurn
from clawloop.errors import ContentUnreadable
from clawloop.ids import SessionId, TurnId
from clawloop.turns.parents import find_parent, may_be_placed
from clawloop.turns.places import PlacedReply
from db.content import ContentCodec, content_of
from db.database import Raw, raw_connection
from db.exact_json import storable
from db.turns.batch_rows import insert_erased, insert_rows
from db.turns.batch_sessions import ERASED, Entry, assign_sessions, columns_of
from db.turns.conversation_cache import ConversationCache
from db.turns.prepared_turn import PreparedTurn
from db.turns.reparent import reparent_late_turns
from db.turns.session_lookup import CANDIDATES, CandidateQuery, find_places_in

log = logging.getLogger(__name__)

# Inserts the new sessions and locks all until the end of the transaction, but not for turns that are stored already.
# A late turn from before an erasure does not reopen its session, and its client's value is gone. A row that this
# statement inserted has no `xmax`; one that it updated has the lock's.
_ALIVE = "(sessions.erased_at IS NULL OR excluded.last_turn_at > sessions.erased_at)"
_LOCK_SESSIONS = f"""
    INSERT INTO sessions (id, policy, api_key_id, external_id, identified_by, state, last_turn_at)
    SELECT r.id, r.policy, r.key, r.external_id, r.identified_by, r.state, r.last_turn_at
    FROM unnest(%b::uuid[], %b::uuid[], %b::text[], %b::uuid[], %b::text[], %b::text[], %b::text[], %b::timestamptz[])
        AS r(turn_id, id, policy, key, external_id, identified_by, state, last_turn_at)
    WHERE NOT EXISTS (SELECT FROM turns WHERE turns.id = r.turn_id)
    ORDER BY r.id
    ON CONFLICT (id) DO UPDATE SET
        state = CASE WHEN excluded.last_turn_at >= sessions.last_turn_at AND {_ALIVE}
            THEN excluded.state ELSE sessions.state END,
        last_turn_at = greatest(excluded.last_turn_at, sessions.last_turn_at),
        external_id = CASE WHEN {_ALIVE} THEN coalesce(sessions.external_id, excluded.external_id) END
    RETURNING id, erased_at, xmax = 0
"""
# Reasons that a turn is not an ordinary one: it is stored already, it repeats or continues a turn erased since it began
# (prefix hashes outlive an erasure), or turns are stored that may continue it.
_STORED, _LATE = "stored", "late"
_SPECIAL = f"""
    SELECT r.n, '{_STORED}' FROM unnest(%b::int[], %b::uuid[]) AS r(n, turn_id) JOIN turns t ON t.id = r.turn_id
    UNION ALL
    SELECT r.n, '{ERASED}'
    FROM unnest(%b::int[], %b::uuid[], %b::bytea[], %b::bool[], %b::uuid[], %b::timestamptz[])
        AS r(n, key, hash, whole, session_id, started_at)
    WHERE EXISTS (
        SELECT FROM session_prefixes p JOIN turns t ON t.id = p.turn_id
        WHERE p.api_key_id = r.key AND p.prefix_hash = r.hash AND t.session_id = r.session_id
            AND (p.role = 'reply' OR (p.role = 'request' AND r.whole))
            AND t.outcome = 'erased' AND t.erased_at >= r.started_at)
    UNION ALL
    SELECT r.n, '{_LATE}' FROM unnest(%b::int[], %b::uuid[], %b::uuid[]) AS r(n, turn_id, session_id)
    WHERE EXISTS (
        SELECT FROM turns t WHERE t.session_id = r.session_id AND t.id > r.turn_id AND t.outcome <> 'erased'
            AND (t.parent_turn_id IS NULL OR t.parent_turn_id < r.turn_id))
"""
_STORED_TURNS = "SELECT id, session_id, parent_turn_id FROM turns WHERE id = ANY(%b)"


async def insert_batch(
    connection: AsyncConnection, conversations: ConversationCache, turns: Sequence[PreparedTurn]
) -> list[InsertedTurn | None]:
    """Insert these turns in the caller's transaction; None for a turn whose session another turn of them has.

    Args:
        turns: no two of the same conversation, as far as `PreparedTurn.marks` tell.
    """
    raw = await raw_connection(connection)
    entries = await assign_sessions(raw, turns)
    results: list[InsertedTurn | None] = [None] * len(turns)
    chosen = list({entry.session: entry for entry in reversed(entries)}.values())
    locked = await _lock_sessions(raw, content_of(connection), chosen)
    for inserted in await _read_stored(raw, [entry for entry in chosen if entry not in locked]):
        n = next(entry.n for entry in chosen if entry.prepared.record.turn_id == inserted.turn_id)
        results[n] = inserted
    ordinary: list[Entry] = []
    for entry in locked:
        if entry.was_erased:
            results[entry.n] = await insert_erased(connection, entry)
        else:
            await _find_parent(connection, conversations, entry)
            ordinary.append(entry)
    await insert_rows(raw, ordinary)
    for entry in ordinary:
        if _LATE in entry.special:
            await reparent_late_turns(connection, conversations, entry.prepared, entry.session)
        results[entry.n] = InsertedTurn(
            entry.prepared.record.turn_id,
            entry.session,
            entry.parent,
            duplicate=False,
            opens_session=entry.opens_session,
        )
    return results


async def _lock_sessions(raw: Raw, content: ContentCodec, entries: Sequence[Entry]) -> list[Entry]:
    """Lock the sessions of all turns that are not stored yet, and read what decides about those turns."""
    asked = CandidateQuery(content, [(entry.n, entry.session, entry.prepared.request) for entry in entries])
    candidates = None
    async with raw.pipeline():
        locks = await raw.execute(_LOCK_SESSIONS, _session_parameters(entries))
        if asked.parameters:
            candidates = await raw.execute(CANDIDATES, asked.parameters)
        special = await raw.execute(_SPECIAL, _special_parameters(entries))
    sessions: dict[SessionId, tuple[datetime | None, bool]] = {
        session: (erased_at, is_new) for session, erased_at, is_new in await locks.fetchall()
    }
    by_place = {entry.n: entry for entry in entries}
    for n, what in await special.fetchall():
        by_place[n].special.add(what)
    if candidates is not None:
        for n, candidate in asked.read(await candidates.fetchall()):
            by_place[n].candidates.append(candidate)
    # A turn stored by another transaction while this one waited for the session's lock is stored, too.
    locked = [entry for entry in entries if entry.session in sessions and _STORED not in entry.special]
    for entry in locked:
        entry.erased_at, entry.opens_session = sessions[entry.session]
    return locked


def _session_parameters(entries: Sequence[Entry]) -> list[list[Any]]:
    return columns_of(
        [
            (
                record.turn_id,
                entry.session,
                record.policy,
                record.api_key_id,
                None if record.evidence.value is None else storable(record.evidence.value),
                record.evidence.source.value,
                (SessionState.ENDING if record.ends_session else SessionState.OPEN).value,
                record.started_at,
            )
            for entry in entries
            for record in (entry.prepared.record,)
        ],
        8,
    )


def _special_parameters(entries: Sequence[Entry]) -> list[list[Any]]:
    hashes = [
        (entry.n, record.api_key_id, stored, digest == history.whole, entry.session, record.started_at)
        for entry in entries
        for record, history in ((entry.prepared.record, entry.prepared.request.history),)
        for stored, digest in entry.prepared.content.find_digests((*history.replies, history.whole)).items()
    ]
    turns = [(entry.n, entry.prepared.record.turn_id, entry.session) for entry in entries]
    late = [turn for turn, entry in zip(turns, entries, strict=True) if entry.prepared.response_digest is not None]
    return [*columns_of(turns, 3)[:2], *columns_of(hashes, 6), *columns_of(late, 3)]


async def _read_stored(raw: Raw, entries: Sequence[Entry]) -> list[InsertedTurn]:
    if not entries:
        return []
    rows = await raw.execute(_STORED_TURNS, [[entry.prepared.record.turn_id for entry in entries]])
    return [
        InsertedTurn(TurnId(turn_id), SessionId(session), None if parent is None else TurnId(parent), duplicate=True)
        for turn_id, session, parent in await rows.fetchall()
    ]


async def _find_parent(connection: AsyncConnection, conversations: ConversationCache, entry: Entry) -> None:
    history, placed = entry.prepared.request.history, list[PlacedReply]()
    if not entry.opens_session and may_be_placed(history, entry.candidates):
        found = await find_places_in(connection, entry.session, entry.prepared.request)
        placed, entry.asked = found.replies, found.whole
    if (match := find_parent(history, entry.candidates, placed)) is not None:
        entry.parent, entry.matched_by = match
    if entry.parent is not None:
        try:
            entry.parent_conversation = await conversations.load(connection, entry.parent)
        except ContentUnreadable as error:  # no reason to refuse the turn, which is then stored whole
            named = {"turn_id": str(entry.prepared.record.turn_id), "parent": str(entry.parent), "why": str(error)}
            log.warning("parent unreadable, turn stored whole", extra=named)
