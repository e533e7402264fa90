"""Results of an evaluation outside of Clawloop; each version's figure is an event of its policy."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.browsing import MEASURED
from db.database import Database, transaction
from db.tables import EventRow
from db.training.policies import insert_event


class PostgresMeasurements:
    """Keeps the match of versions for people to see; Clawloop decides nothing by it."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
