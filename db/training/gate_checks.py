"""Stores what the checks of the gate found about versions, in the caller's transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.gate_checks import CheckName, CheckResult, GateCheck
from clawloop.contracts.training import StepState
from db.exact_json import exact_json, storable
from db.tables import GateCheckRow, StepRow
from db.training.policies import lock_policy


async def insert_checks(connection: AsyncConnection, policy: str, version: int, checks: Sequence[GateCheck]) -> None:
    """Insert the checks of a version; one that is stored already stays."""
    for check in checks:
        row = {
            "policy": policy,
            "version": version,
            "name": check.name,
            "result": check.result,
            "reason": storable(check.reason),
            "figures": exact_json(dict(check.figures)),
        }
        await connection.execute(insert(GateCheckRow).values(row).on_conflict_do_nothing())


async def record_check(connection: AsyncConnection, policy: str, version: int, check: GateCheck) -> None:
    """Insert a check of a candidate; nothing once it is decided."""
    await lock_policy(connection, policy)
    state = select(StepRow.state).where(StepRow.policy == policy, StepRow.n == version)
    if (await connection.execute(state)).scalar_one_or_none() == StepState.CANDIDATE:
        await insert_checks(connection, policy, version, [check])


async def read_checks(connection: AsyncConnection, policy: str) -> dict[int, list[GateCheck]]:
    """The checks of the policy's versions, by version, oldest first."""
    checks: defaultdict[int, list[GateCheck]] = defaultdict(list)
    query = select(GateCheckRow).where(GateCheckRow.policy == policy).order_by(GateCheckRow.at, GateCheckRow.name)
    for row in await connection.execute(query):
        check = GateCheck(CheckName(row.name), CheckResult(row.result), row.reason, row.figures)
        checks[row.version].append(check)
    return dict(checks)
