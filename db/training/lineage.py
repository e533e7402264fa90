"""A policy's tree of versions. Every function works in the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import func, literal, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import VersionRef
from clawloop.recipes.recipe import Lora
from db.tables import StepRow, VersionRow

_OF_OTHER_SHAPE = text("""
    SELECT s.n FROM steps s JOIN recipes r ON r.hash = s.recipe_hash
    WHERE s.policy = :policy AND s.state = 'committed' AND (
        CAST(r.content->'train'->'lora'->>'rank' AS int), CAST(r.content->'train'->'lora'->>'alpha' AS float8)
    ) <> (CAST(:rank AS int), CAST(:alpha AS float8))
""")


async def read_parents(connection: AsyncConnection, policy: str) -> dict[int, int]:
    """The parent of every version but 0."""
    query = select(VersionRow.n, VersionRow.parent).where(VersionRow.policy == policy, VersionRow.parent.is_not(None))
    return {row.n: row.parent for row in await connection.execute(query)}


async def version_refs(connection: AsyncConnection, policy: str, wanted: Collection[int]) -> dict[int, VersionRef]:
    """Those of the wanted versions that have files, by number; version 0 never has."""
    query = select(VersionRow).where(
        VersionRow.policy == policy,
        VersionRow.n.in_(wanted),
        VersionRow.path.is_not(None),
        VersionRow.removed_at.is_(None),
    )
    return {row.n: version_ref(row) for row in await connection.execute(query.order_by(VersionRow.n))}


async def of_other_shape(connection: AsyncConnection, policy: str, lora: Lora) -> frozenset[int]:
    """Versions whose adapter has another rank or alpha, so that a model with this one cannot take it on."""
    shape = {"policy": policy, "rank": lora.rank, "alpha": lora.alpha}
    return frozenset(await connection.scalars(_OF_OTHER_SHAPE, shape))


def version_ref(row: Any) -> VersionRef:
    """From a row of `versions` that has files.

    Raises:
        ValueError: it has none, or nobody knows their hash.
    """
    if row.path is None or row.sha256 is None or row.parent is None:
        raise ValueError(f"version {row.n} of {row.policy!r} has no files")
    return VersionRef(row.policy, row.n, row.parent, row.path, row.sha256.hex())


async def next_step(connection: AsyncConnection, policy: str) -> int:
    """The number no step and no version of this policy ever had."""
    used = union_all(
        select(func.max(StepRow.n).label("n")).where(StepRow.policy == policy),
        select(func.max(VersionRow.n)).where(VersionRow.policy == policy),
        select(literal(0)),
    ).subquery()
    return (await connection.scalar(select(func.max(used.c.n))) or 0) + 1
