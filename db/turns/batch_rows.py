"""Writes the rows of a batch's turns, whose sessions are locked and whose parents are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg
from psycopg.rows import TupleRow
from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import InsertedTurn, SessionSource
from clawloop.ids import ApiKeyId, TurnId
from db.arrays import logprobs_to_bytes
from db.content import ContentCodec
from db.database import Raw
from db.erasure import BARE_TURN
from db.exact_json import exact_json, storable
from db.tables import PrefixRole, TurnRow
from db.turns.batch_sessions import Entry, columns_of
from db.turns.deltas import Delta, delta
from db.turns.files import insert_files, insert_references
from db.turns.prepared_turn import PreparedTurn
from db.turns.stored_bytes import content_bytes

_TURN_COLUMNS = (
    *("id", "group_id", "choice", "kind", "kind_reason", "status", "error", "outcome", "outcome_detail", "alias"),
    *("version", "engine_id", "evidence", "response", "sampling", "finish_reason", "ends_session", "started_at"),
    *("finished_at", "session_id", "parent_turn_id", "messages_kept", "messages_added", "prompt_shared"),
    *("episode_id", "stored_bytes", "matched_by"),
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
    bare = exact_json({"source": record.evidence.source, "value": None, "narrowing": []})
    values = record_columns(entry.prepared) | BARE_TURN
    values |= {"session_id": entry.session, "parent_turn_id": None, "evidence": bare}
    # An erased turn: its workflow needs no signal.
    bare_turn = insert(TurnRow).values(announced_at=func.now(), erased_at=func.clock_timestamp())
    await connection.execute(bare_turn.on_conflict_do_nothing(), values)
    return InsertedTurn(record.turn_id, entry.session, None, duplicate=False, erased=True)


def _prefixes(entry: Entry) -> list[tuple[Any, ...]]:
    """Rows of `session_prefixes`: hashes by which later turns find this one's session."""
    prepared, roles = entry.prepared, dict[bytes, PrefixRole]()
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
            {"source": evidence.source, "value": evidence.value, "narrowing": list(evidence.narrowing)}
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
    }
