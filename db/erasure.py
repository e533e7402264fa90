"""Erasing in PostgreSQL: content goes, bare rows stay, so that the ledger of steps and versions stays whole.

Content is whatever a client, an engine or a judge said: messages, token ids, log-probs, sampling fields, names, raw
answers, hints. What stays are ids, numbers, our own words, and the hashes by which a conversation without a name is
known again: so that what of it is still in a spool or in an engine is not taken for a new one. It holds the policy
and the session, so nothing is judged, sampled or entered meanwhile; what comes later finds the turns erased.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import ContentErased, Erasure, SessionFacts
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import SampleId, SessionId, TurnId
from db.database import Database
from db.events import insert_event
from db.tables import SessionRow, TurnRow
from db.training.queue import lock_policy, refresh_work
from db.training.samples import end_samples
from db.turns.prepared_turn import PreparedTurn

WHY = "erased"
"""For people, wherever words were that nobody may read any more."""

WHY_BEFORE = "what followed it was erased"

# Of one message to a workflow; it shows 20 turns, and ids are 16 bytes.
TOLD_LIMIT = 200

BARE_TURN: dict[str, Any] = {
    "outcome": TurnOutcome.ERASED.value,
    "outcome_detail": WHY,
    "kind_reason": WHY,
    "error": None,
    "messages_kept": 0,
    "messages_added": "[]",
    "tools_sha256": None,
    "response": None,
    "response_digest": None,
    "reply_digest": None,
    "prompt_shared": None,
    "prompt_ids": None,
    "response_ids": None,
    "logprobs": None,
    "sampling": "{}",
}
"""What a turn without content holds; its `evidence` names a source and no value."""

_LOCK_SESSION = text("SELECT id FROM sessions WHERE id = :session FOR UPDATE")
_ALL_TURNS = text("SELECT id FROM turns WHERE session_id = :session")
# Other replies to the same request hold the same messages, and whatever continues them holds them again. So does a
# request that goes on without a reply, e.g. after one that was stopped: its messages begin with those.
_FROM_TURN = text("""
    WITH RECURSIVE down AS (
        SELECT t.id FROM turns t JOIN turns own ON own.id = :turn AND own.session_id = t.session_id
        WHERE t.id = own.id OR t.group_id = own.group_id OR (
            own.outcome <> 'erased' AND t.parent_turn_id IS NOT DISTINCT FROM own.parent_turn_id
            AND t.messages_kept = own.messages_kept
            AND starts_with(t.messages_added::text, left(own.messages_added::text, -1))
            AND substr(t.messages_added::text, length(own.messages_added::text), 1) IN (',', ']'))
        UNION
        SELECT t.id FROM down JOIN turns t ON t.parent_turn_id = down.id)
    SELECT id FROM down
""")
# Hashes outlive an erasure.
_ERASED_BEFORE = text("""
    SELECT EXISTS (
        SELECT FROM session_prefixes p JOIN turns t ON t.id = p.turn_id
        WHERE p.api_key_id = :key AND p.prefix_hash = ANY(CAST(:hashes AS bytea[])) AND t.session_id = :session
            AND (p.role = 'reply' OR (p.role = 'request' AND p.prefix_hash = :whole))
            AND t.outcome = 'erased' AND t.erased_at >= :started_at)
""")
# Its workflow is told of the erasure, or knows nothing of them and need not.
_STRIP_TURNS = text(f"""
    UPDATE turns SET {", ".join(f"{column} = :{column}" for column in BARE_TURN)},
        evidence = json_build_object('source', evidence->>'source', 'value', NULL::text, 'narrowing', '[]'::json),
        erased_at = clock_timestamp(), announced_at = coalesce(announced_at, now())
    WHERE id = ANY(:turns)
""")
# Judgements of these turns, and those that were made by what these turns said.
_JUDGEMENTS = """
    SELECT j.id FROM judgements j JOIN turns t ON t.id = j.turn_id
    WHERE t.session_id = :session AND (j.turn_id = ANY(:turns) OR j.shown_by = ANY(:turns))
"""
# Votes on the turn before an erased one that nobody has decided by: what follows next is judged by votes of its own.
_HALF_JUDGED = """
    SELECT j.id FROM judgements j JOIN turns t ON t.id = j.turn_id
    WHERE t.session_id = :session AND j.decided_at IS NULL AND j.shown_by = ANY(:turns)
"""
_STRIP = tuple(
    text(statement)
    for statement in (
        f"DELETE FROM votes WHERE judgement_id IN ({_HALF_JUDGED})",
        f"DELETE FROM hints WHERE judgement_id IN ({_HALF_JUDGED})",
        f"DELETE FROM judgements WHERE id IN ({_HALF_JUDGED})",
        f"""UPDATE judgements SET evidence_hash = '', hint = CASE WHEN hint IS NOT NULL THEN '{WHY}' END
            WHERE id IN ({_JUDGEMENTS})""",
        f"""UPDATE judgements SET why = CASE WHEN why IS NOT NULL THEN '{WHY}' END,
            not_trainable = CASE WHEN not_trainable IS NOT NULL THEN '{WHY}' END
            WHERE turn_id = ANY(:turns)""",
        # A direct vote's are three numbers, and a closing reads them.
        f"UPDATE votes SET raw = '' WHERE kind <> 'direct' AND judgement_id IN ({_JUDGEMENTS})",
        f"UPDATE hints SET raw = '', accepted = NULL, text = NULL WHERE judgement_id IN ({_JUDGEMENTS})",
        # What no judgement has taken in never will be.
        "DELETE FROM feedback WHERE applied_at IS NULL AND turn_id = ANY(:turns)",
        f"UPDATE feedback SET text = '{WHY}' WHERE text IS NOT NULL AND turn_id = ANY(:turns)",
        f"UPDATE samples SET reason = '{WHY}' WHERE state = 'superseded' AND turn_id = ANY(:turns)",
    )
)
_WAITING = f"""
    FROM samples WHERE state = 'fresh' AND (turn_id = ANY(:turns)
        OR (hinted_prompt_ids IS NOT NULL AND judgement_id IN ({_JUDGEMENTS})))
"""
_WAITING_SAMPLES = text(f"SELECT id, turn_id = ANY(:turns) AS own {_WAITING}")
# Whoever stores an answer of a judge or feedback looks at the turn under KEY SHARE, which waits for this. Turns whose
# samples will expire are changed, too: all in one order, as a judge's answer holds a turn and what followed it.
_LOCK_TURNS = text(f"""
    SELECT id, tools_sha256, id = ANY(:turns) AS meant FROM turns
    WHERE outcome <> 'erased' AND (id = ANY(:turns) OR id IN (SELECT turn_id {_WAITING}))
    ORDER BY id FOR UPDATE
""")
_LEARNED_SAMPLES = text(f"""
    SELECT count(*) FROM samples WHERE state IN ('trained', 'claimed') AND (turn_id = ANY(:turns)
        OR (hinted_prompt_ids IS NOT NULL AND judgement_id IN ({_JUDGEMENTS})))
""")
_STRIP_SAMPLES = text(f"""
    UPDATE samples SET hinted_prompt_ids = '' WHERE hinted_prompt_ids IS NOT NULL AND judgement_id IN ({_JUDGEMENTS})
""")
# Two steps: a turn that names a list at this moment is waited for, and then seen.
_LOCK_TOOLS = text("SELECT sha256 FROM tool_lists WHERE sha256 = ANY(:tools) ORDER BY sha256 FOR UPDATE")
_DROP_TOOLS = text("""
    DELETE FROM tool_lists l WHERE l.sha256 = ANY(:tools)
        AND NOT EXISTS (SELECT FROM turns t WHERE t.tools_sha256 = l.sha256)
""")
# Not when this transaction began: it may have waited for its locks since, and what came meanwhile is erased, too.
_END_SESSION = text(f"""
    UPDATE sessions SET external_id = NULL, erased_at = clock_timestamp(), state = 'closed', closed_at = now(),
        closed_why = '{WHY}', first_closed_at = coalesce(first_closed_at, now()),
        guarantee = coalesce(guarantee, 'no sample: {WHY}')
    WHERE id = :session
""")
_TOLD = text("""
    SELECT id FROM turns WHERE session_id = :session AND kind = 'main' AND outcome = 'erased'
    ORDER BY id DESC LIMIT :limit
""")


class PostgresErasureStore:
    """Satisfies `api.ports.Erasures`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def erase_session(self, session: SessionId) -> Erasure | None:
        """All there is of a session, and what of it is still on its way here; None if there is no such session.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_erase, session, None))

    async def erase_turn(self, turn: TurnId) -> Erasure | None:
        """A turn, other replies to its request, and all turns that continue them; None if there is no such turn.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_erase_turn, turn))


async def holds_erased(connection: AsyncConnection, entry: PreparedTurn, session: SessionId) -> bool:
    """Whether a turn on its way repeats the request of one that was erased since, or continues it.

    The session's row must be held.
    """
    found = entry.request.lookup
    values = {
        "key": entry.record.api_key_id,
        "hashes": [*found.replies, found.whole],
        "whole": found.whole,
        "session": session,
        "started_at": entry.record.started_at,
    }
    return bool(await connection.scalar(_ERASED_BEFORE, values))


async def _erase_turn(turn: TurnId, connection: AsyncConnection) -> Erasure | None:
    session = await connection.scalar(select(TurnRow.session_id).where(TurnRow.id == turn))
    return None if session is None else await _erase(SessionId(session), turn, connection)


async def _erase(session: SessionId, turn: TurnId | None, connection: AsyncConnection) -> Erasure | None:
    """
    Args:
        turn: where to begin; None: all of the session.
    """
    query = select(SessionRow.policy, SessionRow.identified_by, SessionRow.created_at).where(SessionRow.id == session)
    facts = (await connection.execute(query)).first()
    if facts is None:
        return None
    await lock_policy(connection, facts.policy)
    await connection.execute(_LOCK_SESSION, {"session": session})
    reached = _ALL_TURNS if turn is None else _FROM_TURN
    meant = (await connection.scalars(reached, {"session": session} if turn is None else {"turn": turn})).all()
    rows = (await connection.execute(_LOCK_TURNS, {"session": session, "turns": list(meant)})).all()
    held = [row for row in rows if row.meant]
    erased = [TurnId(row.id) for row in held]
    which = {"session": session, "turns": erased}
    learned = await connection.scalar(_LEARNED_SAMPLES, which) or 0
    expired = await _strip(connection, session, erased) if erased else 0
    await _drop_tools(connection, sorted({row.tools_sha256 for row in held if row.tools_sha256 is not None}))
    if turn is None:
        await connection.execute(_END_SESSION, {"session": session})
    if erased:
        await insert_event(
            connection,
            facts.policy,
            "erased",
            session=str(session),
            whole=turn is None,
            turns=len(erased),
            expired=expired,
        )
    await refresh_work(connection, facts.policy)
    version = await connection.scalar(select(func.max(TurnRow.version)).where(TurnRow.session_id == session))
    told = (await connection.scalars(_TOLD, {"session": session, "limit": TOLD_LIMIT})).all()
    return Erasure(
        session=SessionFacts(session, facts.policy, facts.identified_by, facts.created_at, version or 0),
        turns=len(erased),
        expired=expired,
        learned=learned,
        told=ContentErased(tuple(TurnId(gone) for gone in told), whole=turn is None),
    )


async def _strip(connection: AsyncConnection, session: SessionId, turns: Sequence[TurnId]) -> int:
    """Take the content of these turns; how many samples expired by it."""
    which = {"session": session, "turns": list(turns)}
    await connection.execute(_STRIP_TURNS, {**BARE_TURN, "turns": list(turns)})
    for statement in _STRIP:
        await connection.execute(statement, which)
    waiting = (await connection.execute(_WAITING_SAMPLES, which)).all()
    ends = {SampleId(sample.id): WHY if sample.own else WHY_BEFORE for sample in waiting}
    await end_samples(connection, ends, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await connection.execute(_STRIP_SAMPLES, which)
    return len(waiting)


async def _drop_tools(connection: AsyncConnection, tools: Sequence[bytes]) -> None:
    """Lists of tools that no turn names any more."""
    if tools:
        await connection.execute(_LOCK_TOOLS, {"tools": list(tools)})
        await connection.execute(_DROP_TOOLS, {"tools": list(tools)})
