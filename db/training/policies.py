"""Policies in PostgreSQL: locked, with their events, their tree of versions, and figures measured elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import JsonValue
from sqlalchemy import func, insert, literal, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.answers import MEASURED
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import NotFound, RecordUnusable
from clawloop.core.ids import TurnId, new_event_id
from clawloop.core.recipes.recipe import Lora
from db.content import exact_json, storable
from db.database import PostgresStore, transaction
from db.tables import EventRow, PolicyRow, SessionRow, StepRow, TurnRow, VersionRow

# Policies -------------------------------------------------------------------------------------------------------------
# Locks a policy's row, records events of it and tells gateways, in the caller's transaction.
#
# A transaction that changes samples or steps takes this lock first, so that no two transactions wait for each other.

CHANNEL = "clawloop_directory"
"""Gateways LISTEN on it; the payload is the policy."""


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


async def notify_directory(connection: AsyncConnection, policy: str) -> None:
    """Have gateways read again which versions answer, and with which lessons."""
    await connection.execute(select(func.pg_notify(CHANNEL, policy)))


async def insert_event(connection: AsyncConnection, policy: str, kind: str, **detail: JsonValue) -> None:
    row = {"id": new_event_id(), "policy": policy, "kind": kind, "detail": exact_json(detail)}
    await connection.execute(insert(EventRow).values(row))


# Lineage --------------------------------------------------------------------------------------------------------------
# Reads a policy's tree of versions, in the caller's transaction.

_OF_OTHER_SHAPE = text("""
    SELECT v.n FROM versions v
        JOIN versions o ON o.policy = coalesce(v.origin_policy, v.policy) AND o.n = coalesce(v.origin_n, v.n)
        LEFT JOIN steps s ON s.policy = o.policy AND s.n = o.n
        LEFT JOIN recipes r ON r.hash = s.recipe_hash
    WHERE v.policy = :policy AND (s.state = 'committed' OR o.lora_rank IS NOT NULL) AND (
        coalesce(o.lora_rank, CAST(r.content->'train'->'lora'->>'rank' AS int)),
        coalesce(o.lora_alpha, CAST(r.content->'train'->'lora'->>'alpha' AS float8))
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


# Measured figures -----------------------------------------------------------------------------------------------------
# Results of an evaluation outside of Clawloop; each version's figure is an event of its policy.


class PostgresMeasurements(PostgresStore):
    """Keeps the match of versions for people to see; Clawloop decides nothing by it."""

    @transaction
    async def record(self, connection: AsyncConnection, policy: str, version: int, match: float, of: int) -> None:
        """
        Args:
            match: share of the evaluation's requests that the version answered as wanted.
            of: number of these requests.
        """
        await insert_event(connection, policy, MEASURED, version=version, match=round(match, 3), of=of)


async def read_matches(connection: AsyncConnection, policy: str) -> dict[int, float]:
    """The newest match of each version that was measured."""
    query = select(EventRow.detail).where(EventRow.policy == policy, EventRow.kind == MEASURED).order_by(EventRow.id)
    return {int(detail["version"]): float(detail["match"]) for detail in await connection.scalars(query)}
