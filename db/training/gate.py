"""Decides about candidates: accepted, its version is the policy's head; rejected, its samples are set aside.

Every change locks the policy's row, so that concurrent changes run one after the other.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.gate_checks import GateCheck
from clawloop.contracts.training import StepState
from clawloop.errors import RecipeRejected
from clawloop.recipes.recipe import Gate
from db.database import Database, transaction
from db.serving.activation import notify_directory
from db.tables import StepRow
from db.training.gate_checks import read_checks, record_check
from db.training.policies import lock_policy
from db.training.recipes import recipe_by_hash
from db.training.step_transitions import abandon_step, accept_step, lock_step, moved_on, reject_step


class PostgresGateStore:
    """Implements `activities.training.gate.GateStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def checks(self, connection: AsyncConnection, policy: str, n: int) -> list[GateCheck]:
        await lock_step(connection, policy, n)
        return (await read_checks(connection, policy)).get(n, [])

    @transaction
    async def record(self, connection: AsyncConnection, policy: str, n: int, check: GateCheck) -> None:
        await record_check(connection, policy, n, check)

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
