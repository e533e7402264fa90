"""Locks a policy's row and records events of it, in the caller's transaction.

A transaction that changes samples or steps takes this lock first, so that no two transactions wait for each other.
"""

from __future__ import annotations

from pydantic import JsonValue
from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import NotFound, RecordUnusable
from clawloop.ids import TurnId, new_event_id
from db.exact_json import exact_json, storable
from db.tables import EventRow, PolicyRow, SessionRow, TurnRow


async def lock_policy(connection: AsyncConnection, policy: str) -> PolicyRow:
    """The policy's row, locked until the end of the transaction. Chat does not wait for this lock.

    Raises:
        RecordUnusable: there is no such policy.
    """
    # NO KEY UPDATE: a new session refers to its policy, and must not wait for a step's claim.
    query = select(PolicyRow.__table__).where(PolicyRow.id == policy).with_for_update(key_share=True)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise RecordUnusable(f"there is no policy {policy!r}")
    return PolicyRow(**row)


async def require_policy(connection: AsyncConnection, policy: str | None) -> None:
    """Tell a policy that is named and does not exist from one of which nothing is recorded; a retired one exists.

    Raises:
        NotFound: there is no such policy.
    """
    if policy is None:
        return
    if (await connection.execute(select(PolicyRow.id).where(PolicyRow.id == storable(policy)))).first() is None:
        raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")


async def lock_policy_of(connection: AsyncConnection, turn_id: TurnId) -> str:
    """Lock the policy of a turn; returns its id."""
    query = select(SessionRow.policy).join(TurnRow, TurnRow.session_id == SessionRow.id).where(TurnRow.id == turn_id)
    policy: str = (await connection.execute(query)).scalar_one()
    await lock_policy(connection, policy)
    return policy


async def insert_event(connection: AsyncConnection, policy: str, kind: str, **detail: JsonValue) -> None:
    row = {"id": new_event_id(), "policy": policy, "kind": kind, "detail": exact_json(detail)}
    await connection.execute(insert(EventRow).values(row))
