"""Reads a policy's tree of versions, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import func, literal, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import VersionRef
from clawloop.recipes.recipe import Lora
from db.tables import StepRow, VersionRow

_OF_OTHER_SHAPE = text("""
    SELECT v.n FROM versions v
        JOIN steps s ON s.policy = coalesce(v.origin_policy, v.policy) AND s.n = coalesce(v.origin_n, v.n)
        JOIN recipes r ON r.hash = s.recipe_hash
    WHERE v.policy = :policy AND s.state = 'committed' AND (
        CAST(r.content->'train'->'lora'->>'rank' AS int), CAST(r.content->'train'->'lora'->>'alpha' AS float8)
    ) <> (CAST(:rank AS int), CAST(:alpha AS float8))
""")


async def read_parents(connection: AsyncConnection, policy: str) -> dict[int, int]:
    """The parent of every version except 0."""
    query = select(VersionRow.n, VersionRow.parent).where(VersionRow.policy == policy, VersionRow.parent.is_not(None))
    return {row.n: row.parent for row in await connection.execute(query)}


async def version_refs(connection: AsyncConnection, policy: str, versions: Collection[int]) -> dict[int, VersionRef]:
    """References of these versions by number, as far as they have files; version 0 never has any."""
    query = select(VersionRow).where(
        VersionRow.policy == policy,
        VersionRow.n.in_(versions),
        VersionRow.path.is_not(None),
        VersionRow.removed_at.is_(None),
    )
    return {row.n: version_ref(row) for row in await connection.execute(query.order_by(VersionRow.n))}


async def versions_of_other_shape(connection: AsyncConnection, policy: str, lora: Lora) -> frozenset[int]:
    """Versions whose adapter has another rank or alpha, so that a model with this LoRA cannot load it."""
    shape = {"policy": policy, "rank": lora.rank, "alpha": lora.alpha}
    return frozenset(await connection.scalars(_OF_OTHER_SHAPE, shape))


def version_ref(row: Any) -> VersionRef:
    """The version of a row of `versions` that has files.

    Raises:
        ValueError: the row has no files, or no hash of them.
    """
    if row.path is None or row.sha256 is None or row.parent is None:
        raise ValueError(f"version {row.n} of {row.policy!r} has no files")
    return VersionRef(row.policy, row.n, row.parent, row.path, row.sha256.hex())


async def next_step(connection: AsyncConnection, policy: str) -> int:
    """The lowest number above those of all steps and versions of the policy."""
    used = union_all(
        select(func.max(StepRow.n).label("n")).where(StepRow.policy == policy),
        select(func.max(VersionRow.n)).where(VersionRow.policy == policy),
        select(literal(0)),
    ).subquery()
    return (await connection.scalar(select(func.max(used.c.n))) or 0) + 1
