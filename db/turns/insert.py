"""Turns in PostgreSQL: entered once each, in one transaction, and read back exactly."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import and_, case, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.dml import ReturningInsert

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, StoredTurn, TurnRecord
from clawloop.ids import ApiKeyId, SessionId, TurnId
from db.arrays import logprobs_to_bytes
from db.database import Database
from db.erasure import BARE_TURN, holds_erased
from db.exact_json import exact_json, storable
from db.tables import PrefixRole, SessionPrefixRow, SessionRow, ToolListRow, TurnRow
from db.turns.conversation_cache import ConversationCache
from db.turns.deltas import delta
from db.turns.prepared_turn import PreparedTurn, Request
from db.turns.read import read_turn
from db.turns.reparent import reparent_late_turns
from db.turns.session_lookup import known_session, parent_in, session_for


def _lock_session_statement() -> ReturningInsert[tuple[datetime | None]]:
    new = insert(SessionRow)
    # What was erased before it came does not open its session again.
    alive = or_(SessionRow.erased_at.is_(None), new.excluded.last_turn_at > SessionRow.erased_at)
    newest = and_(new.excluded.last_turn_at >= SessionRow.last_turn_at, alive)
    return new.on_conflict_do_update(
        index_elements=[SessionRow.id],
        set_={
            "state": case((newest, new.excluded.state), else_=SessionRow.state),
            "last_turn_at": func.greatest(new.excluded.last_turn_at, SessionRow.last_turn_at),
            # It was taken away when the session was erased.
            "external_id": case((alive, func.coalesce(SessionRow.external_id, new.excluded.external_id)), else_=None),
        },
    ).returning(SessionRow.erased_at)


_LOCK_SESSION = _lock_session_statement()
_INSERT_TOOLS = insert(ToolListRow).on_conflict_do_nothing()
_LOCK_TOOLS = text("SELECT sha256 FROM tool_lists WHERE sha256 = :sha256 FOR KEY SHARE")
_INSERT_TURN = insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)


class PostgresTurnStore:
    """Satisfies `api.ports.TurnStore`.

    Args:
        database: its limit is how long `enter` may take.
        chains: what is kept in memory; give the same to stores on the same PostgreSQL. None begins anew.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        """Store one turn in one transaction: its session, its parent, its tokens. Twice is once.

        Raises:
            StoreUnavailable: nothing was stored as far as we know; try again later.
            RecordUnusable: this record can never be stored.
        """
        entry = PreparedTurn(record)
        conversation = entry.conversation
        inserted = await self._database.run(partial(self._insert, entry))
        if not inserted.duplicate and not inserted.erased:
            self._conversations.keep(record.turn_id, conversation)
        return inserted

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        """The version that answered the turn these messages continue; None if they continue none.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_version_of_parent, Request(key, evidence, messages)))

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None:
        """Note that the workflows of these turns were told of them; the first time counts.

        Raises:
            StoreUnavailable
        """
        told = (
            update(TurnRow)
            .where(TurnRow.id.in_(turn_ids), TurnRow.announced_at.is_(None))
            .values(announced_at=func.now())
        )
        await self._database.run(lambda connection: connection.execute(told))

    async def load(self, turn_id: TurnId) -> StoredTurn | None:
        """A turn with all it was entered with; None if there is no such turn.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(read_turn, self._conversations, turn_id))

    async def _insert(self, entry: PreparedTurn, connection: AsyncConnection) -> InsertedTurn:
        turn_id = entry.record.turn_id
        if (found := await _inserted(connection, turn_id)) is not None:
            return found
        session, unknown_before = await session_for(connection, entry)
        erased_at = await _lock_session(connection, session, entry.record)
        gone = erased_at is not None and entry.record.started_at <= erased_at
        if gone or await holds_erased(connection, entry, session):
            return await _insert_erased(connection, entry, session)
        parent = await parent_in(connection, session, entry.request)
        if not await self._insert_turn(connection, entry, session, parent):
            # The same record, entered at the same moment: it waited for the session's row as we did.
            found = await _inserted(connection, turn_id)
            assert found is not None
            return found
        await _insert_prefixes(connection, entry, expecting=unknown_before and parent is None)
        await reparent_late_turns(connection, self._conversations, entry, session)
        return InsertedTurn(turn_id, session, parent, duplicate=False)

    async def _insert_turn(
        self, connection: AsyncConnection, entry: PreparedTurn, session: SessionId, parent: TurnId | None
    ) -> bool:
        """False if it is there already."""
        before = None if parent is None else await self._conversations.conversation(connection, parent)
        tools = entry.conversation.tools_sha256
        if tools is not None and (before is None or before.tools_sha256 != tools):
            await _lock_tools(connection, tools, entry.tools)
        stored = delta(entry.conversation, before)
        values = _columns(entry) | {
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


async def _insert_erased(connection: AsyncConnection, entry: PreparedTurn, session: SessionId) -> InsertedTurn:
    """It was on its way here, in a spool or in an engine, when that was erased: only that it was there stays."""
    record = entry.record
    bare = exact_json({"source": record.evidence.source, "value": None, "narrowing": []})
    values = _columns(entry) | BARE_TURN | {"session_id": session, "parent_turn_id": None, "evidence": bare}
    # No workflow has to hear of it.
    bare_turn = _INSERT_TURN.values(announced_at=func.now(), erased_at=func.clock_timestamp())
    made = await connection.scalar(bare_turn, values)
    return InsertedTurn(record.turn_id, session, None, duplicate=made is None, erased=True)


async def _lock_tools(connection: AsyncConnection, sha256: bytes, tools: str | None) -> None:
    """See that this list is stored, and stays until the end of the transaction."""
    values = {"sha256": sha256, "tools": tools}
    await connection.execute(_INSERT_TOOLS, values)
    if await connection.scalar(_LOCK_TOOLS, values) is None:  # the last turn with it was erased at this moment
        await connection.execute(_INSERT_TOOLS, values)


async def _lock_session(connection: AsyncConnection, session: SessionId, record: TurnRecord) -> datetime | None:
    """Make the session if it is new; its row stays ours until the end of the transaction.

    So turns of one session are entered one after the other, and each sees all before it.

    Returns:
        When it was erased; None if it was not.
    """
    named = record.evidence.value
    values = {
        "id": session,
        "policy": record.policy,
        "api_key_id": record.api_key_id,
        "external_id": None if named is None else storable(named),
        "identified_by": record.evidence.source,
        "state": SessionState.ENDING if record.ends_session else SessionState.OPEN,
        "last_turn_at": record.started_at,
    }
    erased_at: datetime | None = await connection.scalar(_LOCK_SESSION, values)
    return erased_at


async def _insert_prefixes(connection: AsyncConnection, entry: PreparedTurn, expecting: bool) -> None:
    """
    Args:
        expecting: the request holds replies nobody has entered; should their turns come late, they belong here.
    """
    found = entry.request.lookup
    roles: dict[bytes, PrefixRole] = {}
    if expecting and entry.record.evidence.source is SessionSource.CONVERSATION:
        roles = dict.fromkeys(found.replies, PrefixRole.EXPECTED)
    roles[found.whole] = PrefixRole.REQUEST
    if entry.reply_digest is not None:
        roles[entry.reply_digest] = PrefixRole.REPLY
    turn_id, key = entry.record.turn_id, entry.record.api_key_id
    await connection.execute(
        insert(SessionPrefixRow),
        [{"api_key_id": key, "prefix_hash": hash_, "turn_id": turn_id, "role": role} for hash_, role in roles.items()],
    )


async def _version_of_parent(request: Request, connection: AsyncConnection) -> int | None:
    if (session := await known_session(connection, request)) is None:
        return None
    if (parent := await parent_in(connection, session, request)) is None:
        return None
    version: int | None = await connection.scalar(select(TurnRow.version).where(TurnRow.id == parent))
    return version


def _columns(entry: PreparedTurn) -> dict[str, Any]:
    """What a turn's row holds of the record alone."""
    record, conversation = entry.record, entry.conversation
    outcome, detail = entry.outcome
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
        "response_digest": entry.response_digest,
        "reply_digest": entry.reply_digest,
        "response_ids": conversation.response_ids,
        "logprobs": None if record.logprobs is None else logprobs_to_bytes(record.logprobs),
        "sampling": exact_json(record.sampling),
        "finish_reason": None if record.finish_reason is None else storable(record.finish_reason),
        "ends_session": record.ends_session,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
    }
