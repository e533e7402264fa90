"""Erases content: bare rows stay, so that the ledger of steps and versions stays complete.

Content is what a client, an engine or a judge sent: messages and their files, token ids, log-probs, sampling fields,
names, raw answers, hints. Ids, numbers, Clawloop's own reasons and the prefix hashes stay. The hashes keep turns still
in a spool or an engine from being stored as a new conversation. An erasure locks the policy and the session, so that
nothing is judged, sampled or inserted meanwhile; later writers find the turns erased.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import ContentErased, Erasure, SessionFacts, SessionState
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import Message, TurnKind, TurnOutcome
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing
from clawloop.core.ids import ApiKeyId, SampleId, SessionId, TurnId
from clawloop.core.turns.copies import find_copies
from db.content import exact_json
from db.database import PostgresStore, transaction
from db.encryption.columns import opened
from db.lessons.ledger import erase_lessons, lessons_from
from db.lessons.yardstick import forget_replies
from db.tables import SessionRow, ToolListRow, TurnRow
from db.training.policies import insert_event, lock_policy
from db.training.samples import end_samples
from db.training.work_flag import refresh_work_flag
from db.turns.files import release_files
from db.turns.stored_bytes import ROW_BYTES, add_stored_bytes

WHY = "erased"
"""Replaces erased text and reasons."""

WHY_BEFORE = "what followed it was erased"

# Turns in one signal to a workflow, which shows 20; an id takes 16 bytes.
NOTIFIED_TURNS = 200

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
    "asked_digest": None,
    "matched_by": None,
    "prompt_shared": None,
    "prompt_ids": None,
    "response_ids": None,
    "logprobs": None,
    "lessons": None,
    "sampling": "{}",
    "stored_bytes": 0,
}
"""Columns of a turn without content; its `evidence` has a source and no value."""

# Other replies to the same request hold the same messages, practised ones among them, and so do the turns that continue
# them. So does a request that continues without a reply, e.g. after an aborted one: its messages begin with the same
# ones.
_FROM_TURN = text("""
    WITH RECURSIVE down AS (
        SELECT unnest(CAST(:first AS uuid[])) AS id
        UNION
        SELECT n.id FROM down CROSS JOIN LATERAL (
            SELECT t.id FROM turns t WHERE t.parent_turn_id = down.id
            UNION ALL
            SELECT p.turn_id FROM practice p WHERE p.source_turn_id = down.id AND p.turn_id IS NOT NULL
            UNION ALL
            SELECT y.turn_id FROM yardstick y WHERE y.source_turn_id = down.id AND y.turn_id IS NOT NULL) n)
    SELECT id FROM down
""")
_BESIDE_TURN = text("""
    SELECT t.id, coalesce(t.id = own.id OR t.group_id = own.group_id, false) AS of_request,
        t.messages_added
    FROM turns t JOIN turns own ON own.id = :turn AND own.session_id = t.session_id
    WHERE t.id = own.id OR t.group_id = own.group_id OR (
        own.outcome <> 'erased' AND t.outcome <> 'erased' AND t.parent_turn_id IS NOT DISTINCT FROM own.parent_turn_id
        AND t.messages_kept = own.messages_kept)
""")
# Sets announced_at: the workflow is notified of the erasure instead, or never knew of the turns.
_STRIP_TURNS = text(f"""
    UPDATE turns SET {", ".join(f"{column} = :{column}" for column in BARE_TURN)},
        evidence = json_build_object('source', evidence->>'source', 'value', NULL::text, 'narrowing', '[]'::json,
            'policy', evidence->'policy'),
        erased_at = clock_timestamp(), announced_at = coalesce(announced_at, now())
    WHERE id = ANY(:turns)
""")
# Judgements of these turns, and judgements that used these turns as the next state.
_JUDGEMENTS = """
    SELECT j.id FROM judgements j JOIN turns t ON t.id = j.turn_id
    WHERE t.session_id = :session AND (j.turn_id = ANY(:turns) OR j.shown_by = ANY(:turns))
"""
# Undecided judgements whose next state is an erased turn: the next turn after it gets votes of its own.
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
        # A direct vote is three numbers, which the closing reads.
        f"UPDATE votes SET raw = '' WHERE kind <> 'direct' AND judgement_id IN ({_JUDGEMENTS})",
        f"UPDATE hints SET raw = '', accepted = NULL, text = NULL WHERE judgement_id IN ({_JUDGEMENTS})",
        # Feedback not yet applied is never going to be.
        "DELETE FROM feedback WHERE applied_at IS NULL AND turn_id = ANY(:turns)",
        f"UPDATE feedback SET text = '{WHY}' WHERE text IS NOT NULL AND turn_id = ANY(:turns)",
        """UPDATE step_samples SET advantages = NULL, moves = NULL
            WHERE (advantages IS NOT NULL OR moves IS NOT NULL)
                AND sample_id IN (SELECT id FROM samples WHERE turn_id = ANY(:turns))""",
        f"UPDATE samples SET reason = '{WHY}' WHERE state = 'superseded' AND turn_id = ANY(:turns)",
    )
)
_WAITING = f"""
    FROM samples WHERE state IN ('fresh', 'held_out') AND (turn_id = ANY(:turns)
        OR (hinted_prompts IS NOT NULL AND judgement_id IN ({_JUDGEMENTS})))
"""
_WAITING_SAMPLES = text(f"SELECT id, turn_id = ANY(:turns) AS own {_WAITING}")
# Storing a judge's answer or feedback locks the turn FOR KEY SHARE, which waits for this lock. Turns whose samples will
# expire are locked too, all in one order, because storing a judge's answer locks a turn and the turn after it.
_LOCK_TURNS = text(f"""
    SELECT id, kind, tools_sha256, id = ANY(:turns) AS requested, stored_bytes FROM turns
    WHERE outcome <> 'erased' AND (id = ANY(:turns) OR id IN (SELECT turn_id {_WAITING}))
    ORDER BY id FOR UPDATE
""")
# Feedback that is not applied yet is deleted, of the other the text alone goes.
_FEEDBACK_BYTES = text(f"""
    SELECT coalesce(sum(
        CASE WHEN applied_at IS NULL THEN {ROW_BYTES} ELSE 0 END
        + CASE WHEN text = '{WHY}' THEN 0 ELSE coalesce(octet_length(text), 0) END), 0)
    FROM feedback WHERE turn_id = ANY(:turns)
""")
_LEARNED_SAMPLES = text(f"""
    SELECT count(*) FROM samples WHERE state IN ('trained', 'claimed') AND (turn_id = ANY(:turns)
        OR (hinted_prompts IS NOT NULL AND judgement_id IN ({_JUDGEMENTS})))
""")
_STRIP_SAMPLES = text(f"""
    UPDATE samples SET hinted_prompts = '' WHERE hinted_prompts IS NOT NULL AND judgement_id IN ({_JUDGEMENTS})
""")
# clock_timestamp(), as the transaction may have waited for locks: turns inserted meanwhile are erased too.
_END_SESSION = {
    "external_id": None,
    "erased_at": func.clock_timestamp(),
    "state": SessionState.CLOSED,
    "closed_at": func.now(),
    "closed_why": WHY,
    "first_closed_at": func.coalesce(SessionRow.first_closed_at, func.now()),
    "guarantee": func.coalesce(SessionRow.guarantee, f"no sample: {WHY}"),
}
# Another episode keeps it by a turn with content, or where its verifier may yet read it and no turn was stored so far.
_ARTIFACTS = text("""
    WITH own AS (SELECT DISTINCT episode_id AS id FROM turns WHERE session_id = :session AND episode_id IS NOT NULL)
    SELECT DISTINCT encode(e.artifact_sha256, 'hex') FROM episodes e JOIN own USING (id)
    WHERE e.artifact_sha256 IS NOT NULL AND NOT EXISTS (
        SELECT FROM episodes o WHERE o.artifact_sha256 = e.artifact_sha256 AND o.id NOT IN (SELECT id FROM own) AND (
            EXISTS (SELECT FROM turns t WHERE t.episode_id = o.id AND t.outcome <> 'erased')
            OR (o.state = 'ended' AND NOT EXISTS (SELECT FROM turns t WHERE t.episode_id = o.id))))
""")
# An hour, as a spool may store turns late, and a client summarise before its next turn.
_BESIDE_SESSION = text("""
    SELECT t.id, t.session_id, t.messages_added, t.response
    FROM sessions s JOIN sessions c ON c.api_key_id = s.api_key_id JOIN turns t ON t.session_id = c.id
    WHERE s.id = :session AND t.outcome <> 'erased' AND (
        (c.id = s.id AND t.kind = 'main')
        OR (c.id <> s.id AND c.created_at BETWEEN s.created_at - interval '1 hour' AND interval '1 hour' + coalesce(
                (SELECT max(o.entered_at) FROM turns o WHERE o.session_id = s.id), s.created_at)
            AND NOT EXISTS (SELECT FROM turns m WHERE m.session_id = c.id AND m.kind = 'main')))
    ORDER BY t.id
""")


class PostgresErasureStore(PostgresStore):
    """Implements `clawloop.operations.sessions.ErasureStore`."""

    async def copies_of(self, session: SessionId) -> list[SessionId]:
        own, beside = await self._read_beside(session)
        # Thousands of lines in megabytes of text take seconds, and a gateway has chats to answer meanwhile.
        return await asyncio.to_thread(find_copies, own, beside)

    @transaction
    async def _read_beside(
        self, connection: AsyncConnection, session: SessionId
    ) -> tuple[list[Message], dict[SessionId, list[Message]]]:
        """The messages of the session's main turns, and of sessions of side turns alone that began while it lasted."""
        own: list[Message] = []
        beside: dict[SessionId, list[Message]] = defaultdict(list)
        rows = await connection.execute(_BESIDE_SESSION, {"session": session})
        for row in opened(connection, rows, turns="id"):
            messages = own if row.session_id == session else beside[SessionId(row.session_id)]
            with suppress(ContentUnreadable, EncryptionKeyMissing):
                messages += row.messages_added
                reply = row.response
                messages += [] if reply is None else [reply]
        return own, beside

    @transaction
    async def artifacts_of(self, connection: AsyncConnection, session: SessionId) -> list[str]:
        return list((await connection.scalars(_ARTIFACTS, {"session": session})).all())

    @transaction
    async def erase_session(self, connection: AsyncConnection, session: SessionId) -> Erasure | None:
        return await _erase(connection, session, None)

    @transaction
    async def erase_turn(self, connection: AsyncConnection, turn: TurnId) -> Erasure | None:
        session = await connection.scalar(select(TurnRow.session_id).where(TurnRow.id == turn))
        return None if session is None else await _erase(connection, SessionId(session), turn)


async def _erase(connection: AsyncConnection, session: SessionId, turn: TurnId | None) -> Erasure | None:
    """Erase a session; None if there is no such session.

    Args:
        turn: the first turn to erase; None: the whole session.
    """
    known = (SessionRow.policy, SessionRow.identified_by, SessionRow.created_at, SessionRow.api_key_id)
    facts = (await connection.execute(select(*known).where(SessionRow.id == session))).first()
    if facts is None:
        return None
    await lock_policy(connection, facts.policy)
    await connection.execute(select(SessionRow.id).where(SessionRow.id == session).with_for_update())
    if turn is None:
        requested = (await connection.scalars(select(TurnRow.id).where(TurnRow.session_id == session))).all()
    else:
        first = await _with_its_messages(connection, turn)
        requested = (await connection.scalars(_FROM_TURN, {"first": first})).all()
    rows = (await connection.execute(_LOCK_TURNS, {"session": session, "turns": list(requested)})).all()
    locked = [row for row in rows if row.requested]
    erased = [TurnId(row.id) for row in locked]
    of_users = sum(row.kind != TurnKind.PRACTICE for row in locked)  # no user has seen a practised reply
    which = {"session": session, "turns": erased}
    learned = await connection.scalar(_LEARNED_SAMPLES, which) or 0
    freed = sum(row.stored_bytes for row in locked) + await connection.scalar(_FEEDBACK_BYTES, {"turns": erased})
    await add_stored_bytes(connection, ApiKeyId(facts.api_key_id), -freed)
    expired = await _strip(connection, facts.policy, session, erased) if erased else 0
    # Lists of tools before files, as turns are inserted.
    await _drop_tools(connection, sorted({row.tools_sha256 for row in locked if row.tools_sha256 is not None}))
    await release_files(connection, erased)
    if turn is None:
        await connection.execute(update(SessionRow).where(SessionRow.id == session).values(_END_SESSION))
    if erased:
        await insert_event(
            connection,
            facts.policy,
            "erased",
            session=str(session),
            whole=turn is None,
            turns=of_users,
            expired=expired,
        )
    await refresh_work_flag(connection, facts.policy)
    version = await connection.scalar(select(func.max(TurnRow.version)).where(TurnRow.session_id == session))
    erased_main = (TurnRow.session_id == session, TurnRow.kind == TurnKind.MAIN, TurnRow.outcome == TurnOutcome.ERASED)
    query = select(TurnRow.id).where(*erased_main).order_by(TurnRow.id.desc()).limit(NOTIFIED_TURNS)
    newest = (await connection.scalars(query)).all()
    return Erasure(
        session=SessionFacts(session, facts.policy, facts.identified_by, facts.created_at, version or 0),
        turns=of_users,
        expired=expired,
        learned=learned,
        message=ContentErased(tuple(TurnId(turn_id) for turn_id in newest), whole=turn is None),
    )


async def _with_its_messages(connection: AsyncConnection, turn: TurnId) -> list[UUID]:
    """The turn, the other replies to its request, and requests that begin with its messages.

    Messages that cannot be decrypted are not compared: a lost key must not prevent an erasure.
    """
    added: dict[UUID, list[str]] = {}
    rows = opened(connection, await connection.execute(_BESIDE_TURN, {"turn": turn}), turns="id")
    for row in rows:
        with suppress(ContentUnreadable, EncryptionKeyMissing):
            added[row.id] = [exact_json(message) for message in row.messages_added]
    own = added.get(turn)

    def begins_with_own(messages: list[str] | None) -> bool:
        return bool(own) and messages is not None and messages[: len(own or ())] == own

    return [row.id for row in rows if row.of_request or begins_with_own(added.get(row.id))]


async def _strip(connection: AsyncConnection, policy: str, session: SessionId, turns: Sequence[TurnId]) -> int:
    """Remove the content of these turns; returns how many samples expired."""
    which = {"session": session, "turns": list(turns)}
    await connection.execute(_STRIP_TURNS, {**BARE_TURN, "turns": list(turns)})
    for statement in _STRIP:
        await connection.execute(statement, which)
    await forget_replies(connection, turns)
    waiting = (await connection.execute(_WAITING_SAMPLES, which)).all()
    reasons = {SampleId(sample.id): WHY if sample.own else WHY_BEFORE for sample in waiting}
    await end_samples(connection, reasons, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await connection.execute(_STRIP_SAMPLES, which)
    if lessons := await lessons_from(connection, turns):
        await erase_lessons(connection, policy, lessons, "the conversation that it came from was erased")
    return len(waiting)


async def _drop_tools(connection: AsyncConnection, tools: Sequence[bytes]) -> None:
    """Delete those tool lists that no turn uses any more."""
    if tools:
        # Two statements: the lock waits for a transaction that inserts a turn with the list, the delete then sees that
        # turn.
        of_these = ToolListRow.sha256.in_(tools)
        await connection.execute(
            select(ToolListRow.sha256).where(of_these).order_by(ToolListRow.sha256).with_for_update()
        )
        used = select(TurnRow.id).where(TurnRow.tools_sha256 == ToolListRow.sha256).correlate(ToolListRow)
        await connection.execute(delete(ToolListRow).where(of_these, ~used.exists()))
