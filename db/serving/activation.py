"""Which version answers: changed in one row, told to gateways in the same transaction.

Every function works in the caller's transaction, which must hold the policy.
"""

from __future__ import annotations

from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import EngineRow, EngineVersionRow, PolicyRow, VersionRow

CHANNEL = "clawloop_directory"
"""Gateways LISTEN to it; the payload is the policy."""

_NOTIFY = text("SELECT pg_notify(:channel, :policy)")


async def is_served(connection: AsyncConnection, policy: str, n: int) -> bool:
    """Whether an engine that takes requests has this version; each has version 0.

    What is wrong with an engine does not matter here: one that does not answer has no row, and one that cannot load a
    version, perhaps the active one, must not keep another from taking its place.
    """
    if n == 0:
        return True
    having = (
        select(EngineVersionRow.engine_id)
        .join(EngineRow, EngineRow.id == EngineVersionRow.engine_id)
        .where(EngineVersionRow.policy == policy, EngineVersionRow.version == n)
        .where(~EngineRow.draining)
    )
    return bool(await connection.scalar(select(having.exists())))


async def set_active(connection: AsyncConnection, policy: PolicyRow, n: int) -> None:
    """Let version `n` answer from now on."""
    if policy.active == n:
        return
    versions = update(VersionRow).where(VersionRow.policy == policy.id)
    await connection.execute(versions.where(VersionRow.n == policy.active).values(retired_at=func.now()))
    await connection.execute(versions.where(VersionRow.n == n).values(activated_at=func.now(), retired_at=None))
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy.id).values(active=n))
    await connection.execute(_NOTIFY, {"channel": CHANNEL, "policy": policy.id})
