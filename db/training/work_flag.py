"""Maintains the flag that a policy has a batch waiting: only the call that sets it notifies the training workflow.

The module functions work in the caller's transaction, which must hold the policy's lock (`lock_policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import case, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import OPEN_STEPS
from db.database import PostgresStore, transaction
from db.tables import PolicyRow, StepRow
from db.training.policies import lock_policy

# While a step is computed its workflow takes no other batch, and each signal stays in its history: a trainer may be
# away for weeks. The sweep then signals once an hour instead of once a minute, in case the workflow itself was lost.
_WHILE_COMPUTING = 60

# A batch waits when it is full, or when its oldest sample has waited as long as the recipe allows.
_READY = text("""
    SELECT p.work_waiting, p.paused_reason IS NULL AND (
        EXISTS (
            SELECT FROM samples s WHERE s.policy = p.id AND s.state = 'fresh' AND s.rollout_group_id IS NULL
            ORDER BY s.id LIMIT 1 OFFSET CAST(r.content->'train'->>'batch_samples' AS int) - 1)
        OR (SELECT count(DISTINCT s.rollout_group_id) FROM samples s
            WHERE s.policy = p.id AND s.state = 'fresh' AND s.rollout_group_id IS NOT NULL)
            >= CAST(r.content->'train'->>'batch_groups' AS int)
        OR (SELECT s.created_at FROM samples s WHERE s.policy = p.id AND s.state = 'fresh' ORDER BY s.id LIMIT 1)
            < now() - make_interval(secs => 3600 * CAST(r.content->'train'->>'max_wait_hours' AS float8))) AS ready
    FROM policies p JOIN recipes r ON r.hash = p.recipe_hash WHERE p.id = :policy
""")


# A signal may have been lost after the version that should answer changed, e.g. at the end of a canary. The workflow
# itself retries a publication that it has begun, hence only every ten minutes.
_UNPUBLISHED_AGES = 10
_UNPUBLISHED = text("""
    SELECT p.id FROM policies p LEFT JOIN versions c ON c.policy = p.id AND c.n = p.canary
    WHERE p.retired_at IS NULL AND p.active <> coalesce(p.pinned, c.parent, p.head)
        AND (p.work_signalled_at IS NULL OR p.work_signalled_at < now() - CAST(:age AS interval))
    ORDER BY p.id
""")


async def refresh_work_flag(connection: AsyncConnection, policy: str) -> bool:
    """Recompute the flag; True if this call changed it from False to True."""
    row = (await connection.execute(_READY, {"policy": policy})).one_or_none()
    ready = row is not None and bool(row.ready)
    before = row is not None and row.work_waiting
    if ready != before:
        await set_work_flag(connection, policy, ready)
    return ready and not before


async def set_work_flag(connection: AsyncConnection, policy: str, waiting: bool) -> None:
    flag = update(PolicyRow).where(PolicyRow.id == policy)
    await connection.execute(flag.values(work_waiting=waiting, work_signalled_at=None))


async def notify_by_sweep(connection: AsyncConnection, policy: str) -> None:
    """Have the next sweep notify the policy's workflow, should the caller's own signal be lost."""
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(work_signalled_at=None))


class PostgresWorkStore(PostgresStore):
    """Implements `activities.notify.WorkStore`."""

    @transaction
    async def pending_work(self, connection: AsyncConnection, age: timedelta) -> list[str]:
        # A batch may have become due by waiting alone.
        idle = (
            select(PolicyRow.id)
            .where(~PolicyRow.work_waiting, PolicyRow.paused_reason.is_(None))
            .order_by(PolicyRow.id)
        )
        for policy in (await connection.scalars(idle)).all():
            await lock_policy(connection, policy)
            await refresh_work_flag(connection, policy)
        claimed = select(StepRow.n).where(StepRow.policy == PolicyRow.id, StepRow.state.in_(OPEN_STEPS)).exists()
        due = func.now() - case((claimed, _WHILE_COMPUTING * age), else_=age)
        due_policies = or_(PolicyRow.work_signalled_at.is_(None), PolicyRow.work_signalled_at < due)
        query = select(PolicyRow.id).where(PolicyRow.work_waiting, due_policies).order_by(PolicyRow.id)
        due_now = list(await connection.scalars(query))
        unpublished = await connection.scalars(_UNPUBLISHED, {"age": _UNPUBLISHED_AGES * age})
        return [*due_now, *(policy for policy in unpublished if policy not in due_now)]

    @transaction
    async def mark_work_notified(self, connection: AsyncConnection, policies: Sequence[str]) -> None:
        notified = update(PolicyRow).where(PolicyRow.id.in_(policies))
        await connection.execute(notified.values(work_signalled_at=func.now()))
