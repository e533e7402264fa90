"""Whether a policy has a batch waiting: one flag, so that only the call that raises it tells the training workflow.

Every function but the store's works in the caller's transaction, which must hold the policy (`lock_policy`):
whoever changes samples takes that lock first, so that two of them never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import case, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import StepState
from clawloop.errors import RecordUnusable
from clawloop.ids import TurnId
from db.database import Database, transaction
from db.tables import PolicyRow, SessionRow, StepRow, TurnRow

# While a step is computed its workflow takes no other batch, and each telling stays in its history: a trainer may be
# away for weeks. So it is told once an hour instead of once a minute, in case the workflow itself was lost.
_WHILE_COMPUTING = 60

# A batch is there when a full one is, or when the oldest sample has waited as long as the recipe lets it.
_READY = text("""
    SELECT p.work_waiting, p.paused_reason IS NULL AND (
        EXISTS (
            SELECT FROM samples s WHERE s.policy = p.id AND s.state = 'fresh'
            ORDER BY s.id LIMIT 1 OFFSET CAST(r.content->'train'->>'batch_samples' AS int) - 1)
        OR (SELECT s.created_at FROM samples s WHERE s.policy = p.id AND s.state = 'fresh' ORDER BY s.id LIMIT 1)
            < now() - make_interval(secs => 3600 * CAST(r.content->'train'->>'max_wait_hours' AS float8))) AS ready
    FROM policies p JOIN recipes r ON r.hash = p.recipe_hash WHERE p.id = :policy
""")


async def lock_policy(connection: AsyncConnection, policy: str) -> PolicyRow:
    """The policy's row as it is now; ours until the end of the transaction. Chat is not held up by it.

    Raises:
        RecordUnusable: there is no such policy.
    """
    # NO KEY UPDATE: a new session refers to its policy, and must not wait for a step's claim.
    query = select(PolicyRow.__table__).where(PolicyRow.id == policy).with_for_update(key_share=True)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise RecordUnusable(f"there is no policy {policy!r}")
    return PolicyRow(**row)


async def lock_policy_of(connection: AsyncConnection, turn_id: TurnId) -> str:
    """The same for a turn's policy."""
    query = select(SessionRow.policy).join(TurnRow, TurnRow.session_id == SessionRow.id).where(TurnRow.id == turn_id)
    policy: str = (await connection.execute(query)).scalar_one()
    await lock_policy(connection, policy)
    return policy


async def refresh_work(connection: AsyncConnection, policy: str) -> bool:
    """Set the flag to what is true now; True if work waits and that was not known."""
    row = (await connection.execute(_READY, {"policy": policy})).one_or_none()
    ready = row is not None and bool(row.ready)
    known = row is not None and row.work_waiting
    if ready != known:
        await set_work(connection, policy, ready)
    return ready and not known


async def set_work(connection: AsyncConnection, policy: str, waiting: bool) -> None:
    flag = update(PolicyRow).where(PolicyRow.id == policy)
    await connection.execute(flag.values(work_waiting=waiting, work_signalled_at=None))


class PostgresWorkStore:
    """Satisfies `activities.training.ports.WorkStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def pending_work(self, connection: AsyncConnection, age: timedelta) -> list[str]:
        # Work may have become due by waiting alone.
        quiet = (
            select(PolicyRow.id)
            .where(~PolicyRow.work_waiting, PolicyRow.paused_reason.is_(None))
            .order_by(PolicyRow.id)
        )
        for policy in (await connection.scalars(quiet)).all():
            await lock_policy(connection, policy)
            await refresh_work(connection, policy)
        claimed = select(StepRow.n).where(StepRow.policy == PolicyRow.id, StepRow.state == StepState.CLAIMED).exists()
        due = func.now() - case((claimed, _WHILE_COMPUTING * age), else_=age)
        never_or_long_ago = or_(PolicyRow.work_signalled_at.is_(None), PolicyRow.work_signalled_at < due)
        query = select(PolicyRow.id).where(PolicyRow.work_waiting, never_or_long_ago).order_by(PolicyRow.id)
        return list(await connection.scalars(query))

    @transaction
    async def mark_work_notified(self, connection: AsyncConnection, policies: Sequence[str]) -> None:
        notified = update(PolicyRow).where(PolicyRow.id.in_(policies), PolicyRow.work_waiting)
        await connection.execute(notified.values(work_signalled_at=func.now()))
