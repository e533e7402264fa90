"""Canaries in PostgreSQL: the head answers a share of the sessions until verdicts, or time, decide about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import StepState
from clawloop.errors import RecipeRejected
from clawloop.gate.canary import CanaryDecision, CanaryEnd, decide_canary
from clawloop.recipes.recipe import Gate
from db.database import Database, transaction
from db.serving.activation import canary_parent, notify_directory
from db.tables import PolicyRow, StepRow, VersionRow
from db.training.gate_checks import insert_checks
from db.training.operators import continue_from
from db.training.policies import insert_event, lock_policy
from db.training.recipes import recipe_by_hash
from db.training.schedule import first_id
from db.training.step_transitions import count_rejection
from db.training.work_flag import notify_by_sweep

# While a version is pinned no conversation gets a canary, and the pin holds.
_OPEN = text("SELECT id FROM policies WHERE canary IS NOT NULL AND pinned IS NULL ORDER BY id")
# The newest verdict of each turn; a session that both versions answered is an observation of each. The parent may have
# become the active version after the canary began: then those before are of an older one, and no comparison.
_SESSIONS = text("""
    SELECT t.version = :canary AS of_canary, avg(j.verdict)::float8 AS mean
    FROM turns t JOIN sessions s ON s.id = t.session_id
        CROSS JOIN LATERAL (
            SELECT verdict FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
            ORDER BY revision DESC LIMIT 1) j
    WHERE s.policy = :policy AND t.id >= :first AND t.kind = 'main' AND t.started_at >= greatest(:since, (
            SELECT v.activated_at FROM versions v WHERE v.policy = :policy AND v.n = :other))
        AND t.episode_id IS NULL AND s.identified_by <> 'imported'
        AND t.version IN (:canary, :other) AND j.verdict IS NOT NULL
    GROUP BY t.session_id, t.version
""")


class PostgresCanaryStore:
    """Implements `activities.training.ports.CanaryStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def open(self, connection: AsyncConnection) -> list[str]:
        return list(await connection.scalars(_OPEN))

    @transaction
    async def decide(self, connection: AsyncConnection, policy: str) -> CanaryDecision | None:
        row = await lock_policy(connection, policy)
        if row.canary is None or row.canary_since is None or row.pinned is not None:
            return None
        now = (await connection.execute(select(func.now()))).scalar_one()
        before = await canary_parent(connection, policy, row.canary)
        gate = await _gate(connection, policy, row.canary)
        sessions = await _sessions(connection, row, before)
        decision = decide_canary(
            [each.mean for each in sessions if each.of_canary],
            [each.mean for each in sessions if not each.of_canary],
            (now - row.canary_since) / timedelta(hours=1),
            gate.canary_hours,
        )
        if decision is None:
            return None
        await insert_checks(connection, policy, row.canary, [decision.check])
        detail = {"version": row.canary, "end": decision.end.value, "reason": decision.check.reason}
        await insert_event(connection, policy, "canary_ended", **detail)
        if decision.end is CanaryEnd.WORSE:
            retired = update(VersionRow).where(VersionRow.policy == policy, VersionRow.n == row.canary)
            await connection.execute(retired.values(retired_at=func.now()))
            why = f"version {row.canary} was a canary that verdicts found worse"
            await continue_from(connection, row, before, why, row.rejections)
            await count_rejection(connection, policy, row.canary, f"canary: {decision.check.reason}", gate.pause_after)
            await insert_event(connection, policy, "rolled_back", to=before, head=row.head, active=row.active)
        else:
            accepted = {"canary": None, "rejections": 0}
            await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(accepted))
        await notify_directory(connection, policy)
        await notify_by_sweep(connection, policy)
        return decision


async def _sessions(connection: AsyncConnection, row: PolicyRow, before: int) -> list[Any]:
    parameters = {"policy": row.id, "canary": row.canary, "other": before, "since": row.canary_since}
    assert row.canary_since is not None
    found = await connection.execute(_SESSIONS, parameters | {"first": first_id(row.canary_since)})
    return list(found)


async def _gate(connection: AsyncConnection, policy: str, n: int) -> Gate:
    query = select(StepRow.recipe_hash).where(
        StepRow.policy == policy, StepRow.n == n, StepRow.state == StepState.COMMITTED
    )
    try:
        return (await recipe_by_hash(connection, (await connection.execute(query)).scalar_one())).gate
    except RecipeRejected:  # of another version of Clawloop; the canary must end all the same
        return Gate()
