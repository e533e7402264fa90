"""Changes a policy's active version and notifies gateways, in the caller's transaction.

The caller must hold the policy's lock.
"""

from __future__ import annotations

from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.gate.canary import version_for_all
from db.tables import EngineRow, EngineVersionRow, PolicyRow, VersionRow

CHANNEL = "clawloop_directory"
"""Gateways LISTEN on it; the payload is the policy."""

_NOTIFY = text("SELECT pg_notify(:channel, :policy)")


async def is_served(connection: AsyncConnection, policy: str, n: int) -> bool:
    """True if an engine that takes requests has loaded this version; every engine has version 0.

    An engine's `problem` does not count: an engine that does not answer has no rows in `engine_versions`, and an engine
    that cannot load the active version must not prevent another version from replacing it.
    """
    if n == 0:
        return True
    loaded = (
        select(EngineVersionRow.engine_id)
        .join(EngineRow, EngineRow.id == EngineVersionRow.engine_id)
        .where(EngineVersionRow.policy == policy, EngineVersionRow.version == n)
        .where(~EngineRow.draining)
    )
    return bool(await connection.scalar(select(loaded.exists())))


async def read_version_for_all(connection: AsyncConnection, policy: PolicyRow) -> int:
    """The version that should be active."""
    parent = None if policy.canary is None else await canary_parent(connection, policy.id, policy.canary)
    return version_for_all(policy.head, policy.pinned, parent)


async def canary_parent(connection: AsyncConnection, policy: str, canary: int) -> int:
    """The version that the conversations get which do not get the canary."""
    query = select(VersionRow.parent).where(VersionRow.policy == policy, VersionRow.n == canary)
    return (await connection.execute(query)).scalar_one() or 0


async def notify_directory(connection: AsyncConnection, policy: str) -> None:
    """Have gateways read again which versions answer."""
    await connection.execute(_NOTIFY, {"channel": CHANNEL, "policy": policy})


async def set_active(connection: AsyncConnection, policy: PolicyRow, n: int) -> None:
    """Make version `n` the active one."""
    if policy.active == n:
        return
    versions = update(VersionRow).where(VersionRow.policy == policy.id)
    await connection.execute(versions.where(VersionRow.n == policy.active).values(retired_at=func.now()))
    await connection.execute(versions.where(VersionRow.n == n).values(activated_at=func.now(), retired_at=None))
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy.id).values(active=n))
    await notify_directory(connection, policy.id)
