"""Stores turns: each is inserted once, in one transaction, and reads back exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from sqlalchemy import and_, case, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.dml import ReturningInsert

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, StoredTurn, TurnRecord
from clawloop.ids import ApiKeyId, SessionId, TurnId
from db.arrays import logprobs_to_bytes
from db.database import Database, transaction
from db.erasure import BARE_TURN, repeats_erased_turn
from db.exact_json import exact_json, storable
from db.tables import PrefixRole, SessionPrefixRow, SessionRow, ToolListRow, TurnRow
from db.turns.conversation_cache import ConversationCache
from db.turns.deltas import delta
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import read_turn
from db.turns.reparent import reparent_late_turns
from db.turns.session_lookup import assign_session, find_parent_turn, find_session


def _lock_session_statement() -> ReturningInsert[tuple[datetime | None]]:
    new = insert(SessionRow)
    # A late turn from before the erasure does not reopen its session.
    alive = or_(SessionRow.erased_at.is_(None), new.excluded.last_turn_at > SessionRow.erased_at)
    newest = and_(new.excluded.last_turn_at >= SessionRow.last_turn_at, alive)
    return new.on_conflict_do_update(
        index_elements=[SessionRow.id],
        set_={
            "state": case((newest, new.excluded.state), else_=SessionRow.state),
            "last_turn_at": func.greatest(new.excluded.last_turn_at, SessionRow.last_turn_at),
            # None after an erasure, which removed the client's value.
            "external_id": case((alive, func.coalesce(SessionRow.external_id, new.excluded.external_id)), else_=None),
        },
    ).returning(SessionRow.erased_at)


_LOCK_SESSION = _lock_session_statement()
_INSERT_TOOLS = insert(ToolListRow).on_conflict_do_nothing()
_LOCK_TOOLS = text("SELECT sha256 FROM tool_lists WHERE sha256 = :sha256 FOR KEY SHARE")
_INSERT_TURN = insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)


class PostgresTurnStore:
    """Implements `api.ports.TurnStore`.

    Args:
        database: its time limit bounds `insert`.
        conversations: a cache to share between stores on the same PostgreSQL; None creates one.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        prepared = PreparedTurn(record)
        conversation = prepared.conversation
        inserted = await self._insert(prepared)
        if not inserted.duplicate and not inserted.erased:
            self._conversations.put(record.turn_id, conversation)
        return inserted

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        results = await asyncio.gather(*map(self.insert, records), return_exceptions=True)
        return [cast("InsertedTurn | Exception", result) for result in results]

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        return await self._version_of_parent(Request(key, evidence, messages))

    @transaction
    async def mark_notified(self, connection: AsyncConnection, turn_ids: Sequence[TurnId]) -> None:
        pending = update(TurnRow).where(TurnRow.id.in_(turn_ids), TurnRow.announced_at.is_(None))
        await connection.execute(pending.values(announced_at=func.now()))

    @transaction
    async def load(self, connection: AsyncConnection, turn_id: TurnId) -> StoredTurn | None:
        """The turn as it was inserted; None if there is no such turn.

        Raises:
            StoreUnavailable
        """
        return await read_turn(connection, self._conversations, turn_id)

    @transaction
    async def _version_of_parent(self, connection: AsyncConnection, request: Request) -> int | None:
        if (session := await find_session(connection, request)) is None:
            return None
        if (parent := await find_parent_turn(connection, session, request)) is None:
            return None
        version: int | None = await connection.scalar(select(TurnRow.version).where(TurnRow.id == parent))
        return version

    @transaction
    async def _insert(self, connection: AsyncConnection, prepared: PreparedTurn) -> InsertedTurn:
        turn_id = prepared.record.turn_id
        if (duplicate := await _inserted(connection, turn_id)) is not None:
            return duplicate
        session, unmatched = await assign_session(connection, prepared)
        erased_at = await _lock_session(connection, session, prepared.record)
        session_erased = erased_at is not None and prepared.record.started_at <= erased_at
        if session_erased or await repeats_erased_turn(connection, prepared, session):
            return await _insert_erased(connection, prepared, session)
        parent = await find_parent_turn(connection, session, prepared.request)
        if not await self._insert_turn(connection, prepared, session, parent):
            # Another transaction inserted the same record while this one waited for the session's lock.
            duplicate = await _inserted(connection, turn_id)
            assert duplicate is not None
            return duplicate
        await _insert_prefixes(connection, prepared, expecting=unmatched and parent is None)
        await reparent_late_turns(connection, self._conversations, prepared, session)
        return InsertedTurn(turn_id, session, parent, duplicate=False)

    async def _insert_turn(
        self, connection: AsyncConnection, prepared: PreparedTurn, session: SessionId, parent: TurnId | None
    ) -> bool:
        """False if the row exists."""
        before = None if parent is None else await self._conversations.load(connection, parent)
        tools = prepared.conversation.tools_sha256
        if tools is not None and (before is None or before.tools_sha256 != tools):
            await _insert_tools(connection, tools, prepared.tools)
        stored = delta(prepared.conversation, before)
        values = _columns(prepared) | {
            "session_id": session,
            "parent_turn_id": parent,
            "messages_kept": stored.messages_kept,
            "messages_added": f"[{','.join(stored.messages_added)}]",
            "prompt_shared": stored.prompt_shared,
            "prompt_ids": stored.prompt_ids,
        }
        return await connection.scalar(_INSERT_TURN, values) is not None


async def _inserted(connection: AsyncConnection, turn_id: TurnId) -> InsertedTurn | None:
    query = select(TurnRow.session_id, TurnRow.parent_turn_id).where(TurnRow.id == turn_id)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return None
    parent = None if row.parent_turn_id is None else TurnId(row.parent_turn_id)
    return InsertedTurn(turn_id, SessionId(row.session_id), parent, duplicate=True)


async def _insert_erased(connection: AsyncConnection, prepared: PreparedTurn, session: SessionId) -> InsertedTurn:
    """Insert a bare row for a turn that was in a spool or an engine when its content was erased."""
    record = prepared.record
    bare = exact_json({"source": record.evidence.source, "value": None, "narrowing": []})
    values = _columns(prepared) | BARE_TURN | {"session_id": session, "parent_turn_id": None, "evidence": bare}
    # Its workflow needs no signal.
    bare_turn = _INSERT_TURN.values(announced_at=func.now(), erased_at=func.clock_timestamp())
    inserted = await connection.scalar(bare_turn, values)
    return InsertedTurn(record.turn_id, session, None, duplicate=inserted is None, erased=True)


async def _insert_tools(connection: AsyncConnection, sha256: bytes, tools: str | None) -> None:
    """Insert the tool list if it is missing, and lock it until the end of the transaction."""
    values = {"sha256": sha256, "tools": tools}
    await connection.execute(_INSERT_TOOLS, values)
    if await connection.scalar(_LOCK_TOOLS, values) is None:  # an erasure has just deleted it
        await connection.execute(_INSERT_TOOLS, values)


async def _lock_session(connection: AsyncConnection, session: SessionId, record: TurnRecord) -> datetime | None:
    """Insert the session if it is new, and lock its row until the end of the transaction.

    Turns of one session are therefore inserted one after the other, and each sees all earlier ones.

    Returns:
        When the session was erased; None if it was not.
    """
    client_value = record.evidence.value
    values = {
        "id": session,
        "policy": record.policy,
        "api_key_id": record.api_key_id,
        "external_id": None if client_value is None else storable(client_value),
        "identified_by": record.evidence.source,
        "state": SessionState.ENDING if record.ends_session else SessionState.OPEN,
        "last_turn_at": record.started_at,
    }
    erased_at: datetime | None = await connection.scalar(_LOCK_SESSION, values)
    return erased_at


async def _insert_prefixes(connection: AsyncConnection, prepared: PreparedTurn, expecting: bool) -> None:
    """
    Args:
        expecting: the request holds replies of turns not inserted yet; late turns find this session by them.
    """
    lookup = prepared.request.lookup
    roles: dict[bytes, PrefixRole] = {}
    if expecting and prepared.record.evidence.source is SessionSource.CONVERSATION:
        roles = dict.fromkeys(lookup.replies, PrefixRole.EXPECTED)
    roles[lookup.whole] = PrefixRole.REQUEST
    if prepared.reply_digest is not None:
        roles[prepared.reply_digest] = PrefixRole.REPLY
    turn_id, key = prepared.record.turn_id, prepared.record.api_key_id
    await connection.execute(
        insert(SessionPrefixRow),
        [{"api_key_id": key, "prefix_hash": hash_, "turn_id": turn_id, "role": role} for hash_, role in roles.items()],
    )


def _columns(prepared: PreparedTurn) -> dict[str, Any]:
    """The columns of a turn's row that follow from its record alone."""
    record, conversation = prepared.record, prepared.conversation
    outcome, detail = prepared.outcome
    evidence = record.evidence
    return {
        "id": record.turn_id,
        "group_id": record.group_id,
        "choice": record.choice,
        "kind": record.kind,
        "kind_reason": storable(record.kind_reason),
        "status": record.status,
        "error": None if record.error is None else storable(record.error),
        "outcome": outcome,
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
