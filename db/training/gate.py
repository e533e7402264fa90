"""Decides about candidates, and about canaries."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import CheckResult, GateCheck, StepState
from clawloop.core.errors import RecipeRejected
from clawloop.core.gate.canary import JudgedSessions
from clawloop.core.gate.gate import BY_SESSIONS, decide, found
from clawloop.core.recipes.recipe import Gate
from db.database import PostgresStore, transaction
from db.serving.publishing import canary_parent
from db.tables import PolicyRow, StepRow, VersionRow
from db.training.gate_checks import insert_checks, read_canary_sessions, read_checks, record_checks
from db.training.operators import continue_from
from db.training.policies import insert_event, lock_policy, notify_directory
from db.training.recipes import recipe_by_hash
from db.training.steps import abandon_step, accept_step, count_rejection, lock_step, moved_on, reject_step
from db.training.work_flag import notify_by_sweep

# Candidates -----------------------------------------------------------------------------------------------------------
# Decides about candidates: accepted, its version is the policy's head; rejected, its samples are set aside.
#
# Every change locks the policy's row, so that concurrent changes run one after the other.


class PostgresGateStore(PostgresStore):
    """Implements `activities.training.gate.GateStore`."""

    @transaction
    async def checks(self, connection: AsyncConnection, policy: str, n: int) -> list[GateCheck]:
        await lock_step(connection, policy, n)
        return (await read_checks(connection, policy)).get(n, [])

    @transaction
    async def record(self, connection: AsyncConnection, policy: str, n: int, check: GateCheck) -> None:
        await record_checks(connection, policy, n, [check])

    @transaction
    async def accept(self, connection: AsyncConnection, policy: str, n: int) -> tuple[StepState, str]:
        locked = await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CANDIDATE:
            return StepState(step.state), step.reason or ""
        if (locked.head, locked.epoch) != (step.parent, step.epoch):
            moved = moved_on(locked, step)
            await abandon_step(connection, step, moved)
            return StepState.ABANDONED, moved
        # A pinned version answers whatever is trained, so no conversation could get a canary.
        gate = await _gate(connection, step)
        await accept_step(connection, step, 0.0 if locked.pinned is not None else gate.canary_share)
        if gate.canary_share:
            await notify_directory(connection, policy)
        return StepState.COMMITTED, ""

    @transaction
    async def reject(self, connection: AsyncConnection, policy: str, n: int, reason: str) -> tuple[StepState, str]:
        await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CANDIDATE:
            return StepState(step.state), step.reason or ""
        await reject_step(connection, step, reason, (await _gate(connection, step)).pause_after)
        return StepState.REJECTED, f"rejected: {reason}"


async def _gate(connection: AsyncConnection, step: StepRow) -> Gate:
    try:
        return (await recipe_by_hash(connection, step.recipe_hash)).gate
    except RecipeRejected:  # of another version of Clawloop; the candidate must not stay open
        return Gate()


# Canaries -------------------------------------------------------------------------------------------------------------
# The head answers a share of the sessions until verdicts, or time, decide about it.


class PostgresCanaryStore(PostgresStore):
    """Open canaries, and the decision about each, for `activities.training.gate.Canaries`."""

    @transaction
    async def open(self, connection: AsyncConnection) -> list[str]:
        # While a version is pinned no conversation gets a canary, and the pin holds.
        is_open = (PolicyRow.canary.is_not(None), PolicyRow.pinned.is_(None))
        return list(await connection.scalars(select(PolicyRow.id).where(*is_open).order_by(PolicyRow.id)))

    @transaction
    async def decide(self, connection: AsyncConnection, policy: str) -> GateCheck | None:
        row = await lock_policy(connection, policy)
        if row.canary is None or row.canary_since is None or row.pinned is not None:
            return None
        now = (await connection.execute(select(func.now()))).scalar_one()
        before = await canary_parent(connection, policy, row.canary)
        gate = await _gate_of_version(connection, policy, row.canary)
        of_canary, of_others = await read_canary_sessions(connection, policy, row.canary, before, row.canary_since)
        sessions = JudgedSessions(of_canary, of_others, (now - row.canary_since) / timedelta(hours=1))
        checks = found(BY_SESSIONS, sessions, gate)
        why_not = decide(checks)
        if why_not is None and len(checks) < len(BY_SESSIONS):
            return None  # a check that has not found anything yet may still fail
        check = next((each for each in checks if each.result is CheckResult.FAILED), checks[0])
        await insert_checks(connection, policy, row.canary, checks)
        detail = {"version": row.canary, "result": check.result.value, "reason": check.reason}
        await insert_event(connection, policy, "canary_ended", **detail)
        if why_not is not None:
            retired = update(VersionRow).where(VersionRow.policy == policy, VersionRow.n == row.canary)
            await connection.execute(retired.values(retired_at=func.now()))
            why = f"version {row.canary} was a canary that verdicts found worse"
            await continue_from(connection, row, before, why, row.rejections)
            await count_rejection(connection, policy, row.canary, why_not, gate.pause_after)
            await insert_event(connection, policy, "rolled_back", to=before, head=row.head, active=row.active)
        else:
            accepted = {"canary": None, "rejections": 0}
            await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(accepted))
        await notify_directory(connection, policy)
        await notify_by_sweep(connection, policy)
        return check


async def _gate_of_version(connection: AsyncConnection, policy: str, n: int) -> Gate:
    query = select(StepRow.recipe_hash).where(
        StepRow.policy == policy, StepRow.n == n, StepRow.state == StepState.COMMITTED
    )
    try:
        return (await recipe_by_hash(connection, (await connection.execute(query)).scalar_one())).gate
    except RecipeRejected:  # of another version of Clawloop; the canary must end all the same
        return Gate()
