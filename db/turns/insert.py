"""Stores turns of different sessions in one transaction: each once, and read back exactly."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import TupleRow
from sqlalchemy import func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.turns import (
    InsertedTurn,
    MatchedBy,
    Message,
    SessionEvidence,
    SessionSource,
    StoredTurn,
    TurnKind,
    TurnOutcome,
    TurnRecord,
)
from clawloop.core.errors import ContentUnreadable, RecordUnusable, StoreContended, StoreUnavailable
from clawloop.core.ids import ApiKeyId, LessonId, SessionId, TurnId
from clawloop.core.turns.files import take_files
from clawloop.core.turns.parents import continues_other_words, find_parent, may_be_placed
from clawloop.core.turns.places import PlacedReply
from db.content import ContentCodec, content_of, exact_json, logprobs_to_bytes, storable
from db.database import Database, PostgresStore, Raw, raw_connection, transaction
from db.erasure import BARE_TURN
from db.recovery import mark_turns_notified
from db.tables import PrefixRole, TurnRow
from db.turns.files import insert_files, insert_references
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import ConversationCache, Delta, delta, evidence_from, read_turn
from db.turns.session_lookup import (
    CANDIDATES,
    ERASED,
    CandidateQuery,
    Entry,
    assign_sessions,
    columns_of,
    find_parent_turn,
    find_places_in,
    find_session,
)
from db.turns.stored_bytes import content_bytes

# Rows -----------------------------------------------------------------------------------------------------------------
# Writes the rows of a batch's turns, whose sessions are locked and whose parents are found.

_TURN_COLUMNS = (
    *("id", "group_id", "choice", "kind", "kind_reason", "status", "error", "outcome", "outcome_detail", "alias"),
    *("version", "engine_id", "evidence", "response", "sampling", "finish_reason", "ends_session", "started_at"),
    *("finished_at", "session_id", "parent_turn_id", "messages_kept", "messages_added", "prompt_shared"),
    *("episode_id", "stored_bytes", "matched_by", "lessons"),
)
_BINARY_COLUMNS = (
    "tools_sha256",
    "response_digest",
    "reply_digest",
    "asked_digest",
    "response_ids",
    "logprobs",
    "prompt_ids",
)
_INSERT_TURN = """
    INSERT INTO turns ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING
""".format(
    columns=", ".join((*_TURN_COLUMNS, *_BINARY_COLUMNS)),
    values=", ".join((*(f"%({name})s" for name in _TURN_COLUMNS), *(f"%({name})b" for name in _BINARY_COLUMNS))),
)
_INSERT_TOOLS = "INSERT INTO tool_lists (sha256, tools) VALUES (%b, %s) ON CONFLICT DO NOTHING RETURNING sha256"
# Keeps an erasure from deleting the lists; sorted, as the erasure locks them.
_LOCK_TOOLS = "SELECT sha256 FROM tool_lists WHERE sha256 = ANY(%b::bytea[]) ORDER BY sha256 FOR KEY SHARE"
# One statement, as each costs every turn a part of its time.
_INSERT_PREFIXES = """
    WITH counted AS (
        INSERT INTO stored_bytes (api_key_id, bytes) SELECT * FROM unnest(%b::uuid[], %b::bigint[]))
    INSERT INTO session_prefixes (api_key_id, prefix_hash, turn_id, role)
    SELECT * FROM unnest(%b::uuid[], %b::bytea[], %b::uuid[], %b::text[]) ON CONFLICT DO NOTHING
"""


async def insert_rows(raw: Raw, entries: Sequence[Entry]) -> None:
    if not entries:
        return
    tools: dict[bytes, str | None] = {}
    for entry in entries:
        sha256, before = entry.prepared.conversation.tools_sha256, entry.parent_conversation
        if sha256 is not None and (before is None or before.tools_sha256 != sha256):
            tools[sha256] = entry.prepared.tools
    content = entries[0].prepared.content
    new_tools = await _insert_tools(raw, tools, content)
    values = [_turn_values(entry) for entry in entries]
    added = [
        (entry.prepared.record.turn_id, file)
        for entry, columns in zip(entries, values, strict=True)
        for of_message in entry.prepared.files[columns["messages_kept"] :]
        for file in of_message
    ]
    ids = await insert_files(raw, [file for _, file in added], content)
    sizes = Counter[ApiKeyId]()
    for entry, columns in zip(entries, values, strict=True):
        record = entry.prepared.record
        size = content_bytes(columns) + new_tools.pop(entry.prepared.conversation.tools_sha256 or b"", 0)
        size += sum(len(file.content) for turn_id, file in added if turn_id == record.turn_id)
        if record.kind is TurnKind.PRACTICE:  # its key asked for nothing
            size = 0
        columns["stored_bytes"] = size
        sizes[record.api_key_id] += size
    prefixes = [row for entry in entries for row in _prefixes(entry)]
    async with raw.pipeline():
        await raw.cursor().executemany(_INSERT_TURN, values)
        await raw.execute(_INSERT_PREFIXES, [list(sizes), list(sizes.values()), *columns_of(prefixes, 4)])
        await insert_references(raw, [(turn_id, ids[file.sha256]) for turn_id, file in added])


async def _insert_tools(raw: Raw, tools: dict[bytes, str | None], content: ContentCodec) -> dict[bytes, int]:
    """Insert the tool lists that are missing, and lock them until the end of the transaction.

    Returns:
        The sizes of those that were missing.
    """
    missing, sizes = sorted(tools), dict[bytes, int]()
    while missing:
        async with raw.pipeline():
            rows_of_tools = [
                (sha256, content.write_json(tools[sha256], "tool_lists.tools", sha256.hex())) for sha256 in missing
            ]
            inserted = raw.cursor()
            await inserted.executemany(_INSERT_TOOLS, rows_of_tools, returning=True)
            rows = await raw.execute(_LOCK_TOOLS, [missing])
        by_hash = {sha256: len((stored or "").encode()) for sha256, stored in rows_of_tools}
        sizes |= {sha256: by_hash[sha256] async for sha256 in _first_column(inserted)}
        found = {row[0] for row in await rows.fetchall()}
        missing = [sha256 for sha256 in missing if sha256 not in found]  # an erasure has just deleted them
    return sizes


async def _first_column(cursor: psycopg.AsyncCursor[TupleRow]) -> AsyncIterator[Any]:
    """The first values of the rows of all its results."""
    while True:
        for row in await cursor.fetchall():
            yield row[0]
        if not cursor.nextset():
            return


async def insert_erased(connection: AsyncConnection, entry: Entry) -> InsertedTurn:
    """Insert a bare row for a turn that was in a spool or an engine when its content was erased."""
    record = entry.prepared.record
    evidence = record.evidence
    bare = exact_json({"source": evidence.source, "value": None, "narrowing": [], "policy": evidence.policy})
    values = record_columns(entry.prepared) | BARE_TURN
    values |= {"session_id": entry.session, "parent_turn_id": None, "evidence": bare}
    # An erased turn: its workflow needs no signal.
    bare_turn = insert(TurnRow).values(announced_at=func.now(), erased_at=func.clock_timestamp())
    await connection.execute(bare_turn.on_conflict_do_nothing(), values)
    return InsertedTurn(record.turn_id, entry.session, None, duplicate=False, erased=True)


def _prefixes(entry: Entry) -> list[tuple[Any, ...]]:
    """Rows of `session_prefixes`: hashes by which later turns find this one's session."""
    prepared, roles = entry.prepared, dict[bytes, PrefixRole]()
    if prepared.record.kind is TurnKind.PRACTICE:  # no client continues it
        return []
    history = prepared.request.history
    if entry.unmatched and entry.parent is None and prepared.record.evidence.source is SessionSource.CONVERSATION:
        # The request holds replies of turns that are not inserted yet; they find this session when they are.
        roles = dict.fromkeys(history.replies, PrefixRole.EXPECTED)
    roles[history.whole] = PrefixRole.REQUEST
    if prepared.reply_digest is not None:
        roles[prepared.reply_digest] = PrefixRole.REPLY
    record, content = prepared.record, prepared.content
    return [
        (record.api_key_id, content.write_digest(hash_), record.turn_id, role.value) for hash_, role in roles.items()
    ]


def _turn_values(entry: Entry) -> dict[str, Any]:
    prepared = entry.prepared
    stored = delta(prepared.conversation, entry.parent_conversation)
    return record_columns(prepared) | {
        "session_id": entry.session,
        "parent_turn_id": entry.parent,
        "matched_by": None if entry.matched_by is None else entry.matched_by.value,
        "asked_digest": prepared.content.write_digest(_asked_digest(entry)),
        **delta_columns(stored, prepared.content, prepared.record.turn_id),
    }


def _asked_digest(entry: Entry) -> bytes | None:
    """Digest of the request as matched; None if no reply can stand right after it."""
    prepared = entry.prepared
    if prepared.response_digest is None or prepared.goes_on:
        return None
    return prepared.request.history.whole if entry.asked is None else entry.asked


def delta_columns(stored: Delta, content: ContentCodec, turn_id: TurnId) -> dict[str, Any]:
    """The columns that say what a turn adds to its parent."""
    added = f"[{','.join(stored.messages_added)}]"
    return {
        "messages_kept": stored.messages_kept,
        "messages_added": content.write_json(added, "turns.messages_added", turn_id),
        "prompt_shared": stored.prompt_shared,
        "prompt_ids": content.write_bytes(stored.prompt_ids, "turns.prompt_ids", turn_id),
    }


def record_columns(prepared: PreparedTurn) -> dict[str, Any]:
    """The columns of a turn's row that follow from its record alone."""
    record, conversation, content = prepared.record, prepared.conversation, prepared.content
    turn_id, evidence = record.turn_id, record.evidence
    outcome, detail = prepared.outcome
    error = None if record.error is None else storable(record.error)
    logprobs = None if record.logprobs is None else logprobs_to_bytes(record.logprobs)
    return {
        "id": record.turn_id,
        "group_id": record.group_id,
        "choice": record.choice,
        "kind": record.kind.value,
        "kind_reason": storable(record.kind_reason),
        "status": record.status.value,
        "error": content.write_text(error, "turns.error", turn_id),
        "outcome": outcome.value,
        "outcome_detail": None if detail is None else storable(detail),
        "alias": storable(record.alias),
        "version": record.version,
        "engine_id": record.engine_id,
        "evidence": exact_json(
            {
                "source": evidence.source,
                "value": evidence.value,
                "narrowing": list(evidence.narrowing),
                "policy": evidence.policy,
            }
        ),
        "tools_sha256": conversation.tools_sha256,
        "response": content.write_json(conversation.response, "turns.response", turn_id),
        "response_digest": content.write_digest(prepared.response_digest),
        "reply_digest": content.write_digest(prepared.reply_digest),
        "response_ids": content.write_bytes(conversation.response_ids, "turns.response_ids", turn_id),
        "logprobs": content.write_bytes(logprobs, "turns.logprobs", turn_id),
        "sampling": content.write_json(exact_json(record.sampling), "turns.sampling", turn_id),
        "finish_reason": None if record.finish_reason is None else storable(record.finish_reason),
        "ends_session": record.ends_session,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "episode_id": record.episode_id,
        "lessons": [lesson.id for lesson in record.lessons] or None,
    }


# Late parents ---------------------------------------------------------------------------------------------------------
# Reparents turns that were inserted before their parent, once the parent arrives, e.g. from a spool.
#
# Their rows get another parent and another delta against it; the conversations they stand for stay the same.

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


# One batch ------------------------------------------------------------------------------------------------------------
# Inserts turns of different sessions in one transaction, in a handful of statements whatever their number.
#
# Locks, in this order: the conversations without a name (advisory, by what they begin with), then the sessions' rows
# by id. So turns of one conversation are inserted one after the other, each sees all earlier ones, and two
# transactions never wait for each other. The statements go to psycopg directly, in pipelines: with SQLAlchemy each
# takes several times the CPU, and each chat pays for it. What is rare (an erased turn, a late parent) uses the shared
# functions.

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
# An erasure of a lesson waits until the turns that it has to reach are inserted.
_LESSONS_LEFT = "SELECT id FROM lessons WHERE id = ANY(%b::uuid[]) AND state <> 'erased' ORDER BY id FOR SHARE"
_STORED_TURNS = "SELECT id, session_id, parent_turn_id FROM turns WHERE id = ANY(%b)"


async def insert_batch(
    connection: AsyncConnection, conversations: ConversationCache, turns: Sequence[PreparedTurn]
) -> list[InsertedTurn | None]:
    """Insert these turns in the caller's transaction; None for a turn whose session another turn of them has.

    Args:
        turns: no two of the same conversation, as far as `PreparedTurn.marks` and `PreparedTurn.asked` tell.
    """
    raw = await raw_connection(connection)
    entries = await assign_sessions(raw, turns)
    results: list[InsertedTurn | None] = [None] * len(turns)
    chosen = list({entry.session: entry for entry in reversed(entries)}.values())
    locked = await _lock_sessions(raw, content_of(connection), chosen)
    for inserted in await _read_stored(raw, [entry for entry in chosen if entry not in locked]):
        n = next(entry.n for entry in chosen if entry.prepared.record.turn_id == inserted.turn_id)
        results[n] = inserted
    await _drop_erased_lessons(raw, locked)
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


async def _drop_erased_lessons(raw: Raw, entries: Sequence[Entry]) -> None:
    """Take the prompts from turns that a lesson was shown in which was erased since they began."""
    shown = {lesson.id for entry in entries for lesson in entry.prepared.record.lessons}
    if not shown:
        return
    rows = await raw.execute(_LESSONS_LEFT, [sorted(shown)])
    erased = shown - {LessonId(row[0]) for row in await rows.fetchall()}
    for entry in entries:
        if any(lesson.id in erased for lesson in entry.prepared.record.lessons):
            entry.prepared = entry.prepared.without_prompt()


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
    content = entry.prepared.content
    if not entry.opens_session and (
        may_be_placed(history, entry.candidates)
        or continues_other_words(history, entry.candidates, lambda digest: content.find_digests([digest]))
    ):
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


# The store ------------------------------------------------------------------------------------------------------------
# Stores turns: each is inserted once, and reads back exactly.

# A side turn that stays in the conversation has no lessons, and those of the turn before it go on behind it.
_MAIN_TURN = text("""
    WITH RECURSIVE up AS (
        SELECT id, parent_turn_id, matched_by, kind, lessons FROM turns WHERE id = :turn
        UNION ALL
        SELECT t.id, t.parent_turn_id, t.matched_by, t.kind, t.lessons
        FROM up JOIN turns t ON t.id = up.parent_turn_id
        WHERE up.kind = 'side' AND up.matched_by IS DISTINCT FROM 'reply')
    SELECT lessons FROM up WHERE kind = 'main'
""")


class PostgresTurnStore(PostgresStore):
    """Implements `api.stores.TurnStore`.

    Args:
        database: its time limit bounds each transaction.
        conversations: a cache to share between stores on the same PostgreSQL; None creates one.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        super().__init__(database)
        self._conversations = conversations or ConversationCache()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        (result,) = await self.insert_many([record])
        if isinstance(result, InsertedTurn):
            return result
        raise result

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        results: dict[int, InsertedTurn | Exception] = {}
        waiting: dict[int, PreparedTurn] = {}
        for place, record in enumerate(records):
            try:
                waiting[place] = PreparedTurn.checked(record, self._database.content)
            except RecordUnusable as error:
                results[place] = error
        while waiting:
            batch = _of_different_conversations(waiting)
            inserted = await self._insert_separably([waiting[place] for place in batch])
            for place, result in zip(batch, inserted, strict=True):
                if result is not None:
                    results[place] = result
                    del waiting[place]
        return [results[place] for place in range(len(records))]

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        return await self._version_of_parent(Request(key, evidence, take_files(messages)[0]))

    async def lessons_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> tuple[LessonId, ...] | None:
        return await self._lessons_of_parent(Request(key, evidence, take_files(messages)[0]))

    @transaction
    async def parent_of(self, connection: AsyncConnection, turn_id: TurnId) -> TurnId | None:
        parent = await connection.scalar(select(TurnRow.parent_turn_id).where(TurnRow.id == turn_id))
        return None if parent is None else TurnId(parent)

    @transaction
    async def mark_notified(self, connection: AsyncConnection, turn_ids: Sequence[TurnId], ago: timedelta) -> None:
        await mark_turns_notified(connection, turn_ids, ago)

    @transaction
    async def load(self, connection: AsyncConnection, turn_id: TurnId) -> StoredTurn | None:
        """The turn as it was inserted, with references in place of files; None if there is no such turn.

        Raises:
            StoreUnavailable
        """
        return await read_turn(connection, self._conversations, turn_id)

    @transaction
    async def _version_of_parent(self, connection: AsyncConnection, request: Request) -> int | None:
        if (session := await find_session(connection, request)) is None:
            return None
        if (found := await find_parent_turn(connection, session, request)) is None:
            return None
        version: int | None = await connection.scalar(select(TurnRow.version).where(TurnRow.id == found[0]))
        return version

    @transaction
    async def _lessons_of_parent(self, connection: AsyncConnection, request: Request) -> tuple[LessonId, ...] | None:
        if (session := await find_session(connection, request)) is None:
            return None
        found = await find_parent_turn(connection, session, request)
        if found is None or found[1] is MatchedBy.REPLY:
            return None
        main = (await connection.execute(_MAIN_TURN, {"turn": found[0]})).one_or_none()
        return None if main is None else tuple(map(LessonId, main.lessons or ()))

    async def _insert_separably(self, turns: Sequence[PreparedTurn]) -> Sequence[InsertedTurn | Exception | None]:
        """Insert turns in one transaction; each in its own if one of them fails or needs a row that is locked.

        None for a turn that has the session of another turn of `turns`; at least one result is not None.
        """
        try:
            results = await self._insert_batch(turns)
        except Exception as error:  # noqa: BLE001 - handed to the caller, beside the results of the other turns
            if len(turns) == 1 or (isinstance(error, StoreUnavailable) and not isinstance(error, StoreContended)):
                return [error] * len(turns)
            alone = await asyncio.gather(*(self._insert_separably([turn]) for turn in turns))
            return [result for (result,) in alone]
        for turn, result in zip(turns, results, strict=True):
            if result is not None and not result.duplicate and not result.erased:
                self._conversations.put(result.turn_id, turn.conversation)
        return results

    @transaction
    async def _insert_batch(
        self, connection: AsyncConnection, turns: Sequence[PreparedTurn]
    ) -> list[InsertedTurn | None]:
        return await insert_batch(connection, self._conversations, turns)


def _of_different_conversations(waiting: dict[int, PreparedTurn]) -> list[int]:
    """Places of turns of which no two can be of one conversation, as far as their records tell."""
    seen: set[bytes] = set()
    asked: set[bytes] = set()
    places: list[int] = []
    for place, turn in waiting.items():
        if seen.isdisjoint(turn.marks | turn.asked) and asked.isdisjoint(turn.marks):
            places.append(place)
        seen |= turn.marks
        asked |= turn.asked
    return places
