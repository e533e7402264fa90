"""Marks work that waits for a workflow, once Temporal has lost it, and reads what PostgreSQL knows.

The module functions work in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import KeyOfTurns, RejudgeRequested, SessionFacts, WaitingWork
from clawloop.core.contracts.training import StepState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import ApiKeyId, FeedbackId, SessionId, TurnId
from db.database import PostgresStore, transaction
from db.serving.keys import secretless_key
from db.tables import ApiKeyRow, FeedbackRow, PolicyRow, SessionRow, StepRow, TemporalServerRow, TurnRow, VersionRow
from db.training.policies import lock_policy, next_step
from db.training.steps import abandon_step, lock_step

# More than a call waits for its connection and its answer: `ago` is measured before.
_CALL_TAKES = timedelta(seconds=10)
_LOST = "lost"  # the name of a key that was added for its turns
# A revision that waits for feedback is signalled with the feedback.
_OPEN_REJUDGEMENTS = text("""
    SELECT t.id AS turn, t.version, j.revision, s.id AS session, s.policy, s.identified_by, s.created_at
    FROM judgements j JOIN turns t ON t.id = j.turn_id JOIN sessions s ON s.id = t.session_id
    WHERE j.decided_at IS NULL AND j.revision > 0 AND t.outcome <> 'erased'
        AND NOT EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id AND f.applied_at IS NULL)
    ORDER BY t.id, j.revision
""")
# A reply is judged when the next main turn below it is signalled, in any state of that turn itself. Turns of
# episodes wait for their group, not for a signal. Locked in one order, as policies.
_FORGET_TURNS = text("""
    WITH RECURSIVE waiting AS (
        SELECT id FROM turns WHERE outcome = 'waiting' AND kind = 'main' AND episode_id IS NULL),
    down AS (
        SELECT t.id, t.kind FROM waiting w JOIN turns t ON t.parent_turn_id = w.id
        UNION
        SELECT t.id, t.kind FROM down d JOIN turns t ON t.parent_turn_id = d.id WHERE d.kind = 'side'),
    signalled AS (SELECT id FROM waiting UNION SELECT id FROM down WHERE kind = 'main'),
    locked AS (
        SELECT t.id FROM turns t JOIN signalled s ON s.id = t.id WHERE t.outcome <> 'erased'
        ORDER BY t.id FOR NO KEY UPDATE OF t)
    UPDATE turns t SET announced_at = NULL FROM locked l WHERE t.id = l.id RETURNING t.session_id, t.outcome
""")


async def forget_signals(connection: AsyncConnection) -> WaitingWork:
    """Mark as never signalled, so that the sweep signals it: turns that wait, what follows them, feedback, and steps.

    Idempotent. Of other locks the caller may hold the row of `temporal_server` alone.
    """
    # Lock this row first: `_were_forgotten` then blocks here and reads the new time.
    await connection.execute(select(TemporalServerRow.only_row).with_for_update())
    await connection.execute(update(TemporalServerRow).values(forgotten_at=func.now()))
    # Policies first, as everywhere; in the order in which judging locks several, as it may go on meanwhile.
    await connection.execute(select(PolicyRow.id).order_by(PolicyRow.id).with_for_update(key_share=True))
    await connection.execute(update(PolicyRow).values(work_signalled_at=None))
    rows = (await connection.execute(_FORGET_TURNS)).all()
    waiting = [row.session_id for row in rows if row.outcome == TurnOutcome.WAITING]
    feedback = update(FeedbackRow).where(FeedbackRow.applied_at.is_(None)).values(announced_at=None)
    return WaitingWork(len(set(waiting)), len(waiting), (await connection.execute(feedback)).rowcount)


async def mark_turns_notified(connection: AsyncConnection, turns: Sequence[TurnId], ago: timedelta) -> None:
    """Record that the workflows of these turns were notified, the first one so long ago; keeps the time of the first
    call. Records nothing if the signals may be lost."""
    if not await _were_forgotten(connection, ago):
        pending = update(TurnRow).where(TurnRow.id.in_(turns), TurnRow.announced_at.is_(None))
        await connection.execute(pending.values(announced_at=func.now()))


async def mark_feedback_notified(connection: AsyncConnection, feedback: Sequence[FeedbackId], ago: timedelta) -> None:
    """Record that workflows were notified of this feedback, the first one so long ago; nothing if the signals may be
    lost."""
    if not await _were_forgotten(connection, ago):
        notified = update(FeedbackRow).where(FeedbackRow.id.in_(feedback))
        await connection.execute(notified.values(announced_at=func.now()))


async def _were_forgotten(connection: AsyncConnection, ago: timedelta) -> bool:
    """True if signals that were sent so long ago may since have been marked as never sent; stays as it is until the
    transaction ends.

    A server that was lost took such signals with it: to mark them as sent would keep them from the next server.
    """
    later = select(TemporalServerRow.forgotten_at > func.now() - ago - _CALL_TAKES)
    return bool(await connection.scalar(later.with_for_update(read=True, key_share=True)))


class PostgresRecoveryStore(PostgresStore):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    @transaction
    async def forget_signals(self, connection: AsyncConnection) -> WaitingWork:
        """Mark as never signalled, so that the sweep signals it: turns that wait, what follows them, feedback, and
        steps."""
        return await forget_signals(connection)

    @transaction
    async def open_rejudgements(self, connection: AsyncConnection) -> list[tuple[SessionFacts, RejudgeRequested]]:
        """The judgements that an operator asked for and that are not decided."""
        return [
            (
                SessionFacts(SessionId(row.session), row.policy, row.identified_by, row.created_at, row.version),
                RejudgeRequested(TurnId(row.turn), row.revision),
            )
            for row in await connection.execute(_OPEN_REJUDGEMENTS)
        ]

    @transaction
    async def newest_versions(self, connection: AsyncConnection) -> dict[str, int]:
        """Each policy's newest version."""
        newest = select(func.max(VersionRow.n)).where(VersionRow.policy == PolicyRow.id).scalar_subquery()
        rows = await connection.execute(select(PolicyRow.id, newest.label("newest")).order_by(PolicyRow.id))
        return {row.id: row.newest or 0 for row in rows}

    @transaction
    async def known_sessions(self, connection: AsyncConnection, sessions: Sequence[SessionId]) -> frozenset[SessionId]:
        """The ones of these sessions that PostgreSQL has."""
        found = await connection.scalars(select(SessionRow.id).where(SessionRow.id.in_(sessions)))
        return frozenset(SessionId(session) for session in found)

    @transaction
    async def known_turns(self, connection: AsyncConnection, turns: Sequence[TurnId]) -> frozenset[TurnId]:
        """The ones of these turns that PostgreSQL has."""
        found = await connection.scalars(select(TurnRow.id).where(TurnRow.id.in_(turns)))
        return frozenset(TurnId(turn) for turn in found)

    @transaction
    async def known_steps(self, connection: AsyncConnection, policies: Collection[str]) -> frozenset[tuple[str, int]]:
        """The steps of these policies, in any state, and the versions that no step made."""
        steps = select(StepRow.policy, StepRow.n).where(StepRow.policy.in_(policies))
        brought = select(VersionRow.policy, VersionRow.n).where(
            VersionRow.policy.in_(policies), VersionRow.lora_rank.is_not(None)
        )
        rows = await connection.execute(steps.union(brought))
        return frozenset((row.policy, row.n) for row in rows)

    @transaction
    async def lost_keys(self, connection: AsyncConnection, keys: Collection[KeyOfTurns]) -> frozenset[KeyOfTurns]:
        """The ones of these keys that PostgreSQL lacks."""
        stored = select(ApiKeyRow.id).where(ApiKeyRow.id.in_([key.key for key in keys]))
        known = {ApiKeyId(key) for key in await connection.scalars(stored)}
        return frozenset(key for key in keys if key.key not in known)

    @transaction
    async def add_lost_keys(self, connection: AsyncConnection, keys: Collection[KeyOfTurns]) -> frozenset[ApiKeyId]:
        """Store the missing keys as revoked, with a secret that no client has, so that their turns can be stored; keys
        of policies that are not stored are left out. Returns the keys that were added, now or before."""
        policies = set(await connection.scalars(select(PolicyRow.id)))
        rows = [secretless_key(key.key, key.policy, _LOST) for key in keys if key.policy in policies]
        if not rows:
            return frozenset()
        added = postgresql.insert(ApiKeyRow).values(rows)
        await connection.execute(added.on_conflict_do_nothing(index_elements=["id"]))
        lost = select(ApiKeyRow.id).where(ApiKeyRow.id.in_([row["id"] for row in rows]), ApiKeyRow.name == _LOST)
        return frozenset(map(ApiKeyId, await connection.scalars(lost.where(ApiKeyRow.revoked_at.is_not(None)))))

    @transaction
    async def skip_numbers(self, connection: AsyncConnection, policy: str, lost: int) -> None:
        """Number the policy's next step above `lost`; an open step up to there that has made no version is abandoned,
        as it would be computed again. Idempotent. A policy that has never had a recipe makes no version, and is left
        alone."""
        locked = await lock_policy(connection, policy)
        # A policy has one open step at most.
        claimed = select(StepRow.n).where(StepRow.policy == policy, StepRow.state == StepState.CLAIMED)
        if (n := await connection.scalar(claimed.where(StepRow.n <= lost))) is not None:
            step = await lock_step(connection, policy, n)
            await abandon_step(connection, step, "versions from its number on were lost with an older PostgreSQL")
        newest = select(StepRow.recipe_hash).where(StepRow.policy == policy).order_by(StepRow.n.desc()).limit(1)
        recipe = locked.recipe_hash or await connection.scalar(newest)
        if recipe is None or lost < await next_step(connection, policy):
            return
        # Insert step `lost + 1`, not `lost`: the directory of a known step without a version is deleted.
        skipped = {"policy": policy, "n": lost + 1, "parent": locked.head, "epoch": locked.epoch}
        why = f"versions up to {lost} were lost with an older PostgreSQL, and their numbers are not used again"
        ended = {"recipe_hash": recipe, "state": StepState.ABANDONED, "reason": why}
        await connection.execute(insert(StepRow).values(skipped | ended | {"finished_at": func.now()}))
