"""Writes the rows of a batch's turns, whose sessions are locked and whose parents are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import InsertedTurn, SessionSource
from db.arrays import logprobs_to_bytes
from db.database import Raw
from db.erasure import BARE_TURN
from db.exact_json import exact_json, storable
from db.tables import PrefixRole, TurnRow
from db.turns.batch_sessions import Entry, columns_of
from db.turns.deltas import delta
from db.turns.prepared_turn import PreparedTurn

_TURN_COLUMNS = (
    *("id", "group_id", "choice", "kind", "kind_reason", "status", "error", "outcome", "outcome_detail", "alias"),
    *("version", "engine_id", "evidence", "response", "sampling", "finish_reason", "ends_session", "started_at"),
    *("finished_at", "session_id", "parent_turn_id", "messages_kept", "messages_added", "prompt_shared"),
    "episode_id",
)
_BINARY_COLUMNS = ("tools_sha256", "response_digest", "reply_digest", "response_ids", "logprobs", "prompt_ids")
_INSERT_TURN = """
    INSERT INTO turns ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING
""".format(
    columns=", ".join((*_TURN_COLUMNS, *_BINARY_COLUMNS)),
    values=", ".join((*(f"%({name})s" for name in _TURN_COLUMNS), *(f"%({name})b" for name in _BINARY_COLUMNS))),
)
_INSERT_TOOLS = "INSERT INTO tool_lists (sha256, tools) VALUES (%b, %s) ON CONFLICT DO NOTHING"
# Keeps an erasure from deleting the lists; sorted, as the erasure locks them.
_LOCK_TOOLS = "SELECT sha256 FROM tool_lists WHERE sha256 = ANY(%b::bytea[]) ORDER BY sha256 FOR KEY SHARE"
_INSERT_PREFIXES = """
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
    await _insert_tools(raw, tools)
    async with raw.pipeline():
        await raw.cursor().executemany(_INSERT_TURN, [_turn_values(entry) for entry in entries])
        await raw.execute(_INSERT_PREFIXES, columns_of([row for entry in entries for row in _prefixes(entry)], 4))


async def _insert_tools(raw: Raw, tools: dict[bytes, str | None]) -> None:
    """Insert the tool lists that are missing, and lock them until the end of the transaction."""
    missing = sorted(tools)
    while missing:
        async with raw.pipeline():
            await raw.cursor().executemany(_INSERT_TOOLS, [(sha256, tools[sha256]) for sha256 in missing])
            rows = await raw.execute(_LOCK_TOOLS, [missing])
        found = {row[0] for row in await rows.fetchall()}
        missing = [sha256 for sha256 in missing if sha256 not in found]  # an erasure has just deleted them


async def insert_erased(connection: AsyncConnection, entry: Entry) -> InsertedTurn:
    """Insert a bare row for a turn that was in a spool or an engine when its content was erased."""
    record = entry.prepared.record
    bare = exact_json({"source": record.evidence.source, "value": None, "narrowing": []})
    values = record_columns(entry.prepared) | BARE_TURN
    values |= {"session_id": entry.session, "parent_turn_id": None, "evidence": bare}
    # Its workflow needs no signal.
    bare_turn = insert(TurnRow).values(announced_at=func.now(), erased_at=func.clock_timestamp())
    await connection.execute(bare_turn.on_conflict_do_nothing(), values)
    return InsertedTurn(record.turn_id, entry.session, None, duplicate=False, erased=True)


def _prefixes(entry: Entry) -> list[tuple[Any, ...]]:
    """Rows of `session_prefixes`: hashes by which later turns find this one's session."""
    prepared, roles = entry.prepared, dict[bytes, PrefixRole]()
    lookup = prepared.request.lookup
    if entry.unmatched and entry.parent is None and prepared.record.evidence.source is SessionSource.CONVERSATION:
        # The request holds replies of turns that are not inserted yet; they find this session when they are.
        roles = dict.fromkeys(lookup.replies, PrefixRole.EXPECTED)
    roles[lookup.whole] = PrefixRole.REQUEST
    if prepared.reply_digest is not None:
        roles[prepared.reply_digest] = PrefixRole.REPLY
    return [(prepared.record.api_key_id, hash_, prepared.record.turn_id, role.value) for hash_, role in roles.items()]


def _turn_values(entry: Entry) -> dict[str, Any]:
    stored = delta(entry.prepared.conversation, entry.parent_conversation)
    return record_columns(entry.prepared) | {
        "session_id": entry.session,
        "parent_turn_id": entry.parent,
        "messages_kept": stored.messages_kept,
        "messages_added": f"[{','.join(stored.messages_added)}]",
        "prompt_shared": stored.prompt_shared,
        "prompt_ids": stored.prompt_ids,
    }


def record_columns(prepared: PreparedTurn) -> dict[str, Any]:
    """The columns of a turn's row that follow from its record alone."""
    record, conversation = prepared.record, prepared.conversation
    outcome, detail = prepared.outcome
    evidence = record.evidence
    return {
        "id": record.turn_id,
        "group_id": record.group_id,
        "choice": record.choice,
        "kind": record.kind.value,
        "kind_reason": storable(record.kind_reason),
        "status": record.status.value,
        "error": None if record.error is None else storable(record.error),
        "outcome": outcome.value,
        "outcome_detail": None if detail is None else storable(detail),
        "alias": storable(record.alias),
        "version": record.version,
        "engine_id": record.engine_id,
        "evidence": exact_json(
            {"source": evidence.source, "value": evidence.value, "narrowing": list(evidence.narrowing)}
        ),
        "tools_sha256": conversation.tools_sha256,
        "response": conversation.response,
        "response_digest": prepared.response_digest,
        "reply_digest": prepared.reply_digest,
        "response_ids": conversation.response_ids,
        "logprobs": None if record.logprobs is None else logprobs_to_bytes(record.logprobs),
        "sampling": exact_json(record.sampling),
        "finish_reason": None if record.finish_reason is None else storable(record.finish_reason),
        "ends_session": record.ends_session,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "episode_id": record.episode_id,
    }
