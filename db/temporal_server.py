"""Stores which Temporal server runs this database's workflows, so that a second one is refused.

Two servers would each start a training workflow and a sweep for the same rows: everything would be judged and trained
by both, the second without the first one's files. PostgreSQL's clock alone decides, so that no worker's clock matters.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.errors import SetupError
from db.database import Database, transaction

RENEW_EVERY = timedelta(seconds=15)
# Orchestrators that are alive miss no three renewals; one that is gone for longer has left the database to others.
HELD_FOR = timedelta(seconds=60)

_SEEN_AT = text("SELECT seen_at FROM temporal_server")
_HOLDER = text(
    "SELECT namespace_id, extract(epoch FROM now() - seen_at)::float8 AS seconds FROM temporal_server FOR UPDATE"
)
_HOLD = text("""
    INSERT INTO temporal_server (namespace_id) VALUES (:namespace_id)
    ON CONFLICT (only_row) DO UPDATE SET namespace_id = excluded.namespace_id, seen_at = now()
""")
# Past what anybody waits for. Another orchestrator of the same server renews it again.
_RELEASE = text("UPDATE temporal_server SET seen_at = now() - interval '1 day' WHERE namespace_id = :namespace_id")


class TemporalServerStore:
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def hold(self, connection: AsyncConnection, namespace_id: str, formerly: str | None = None) -> None:
        """Note that this server runs the workflows now.

        Args:
            namespace_id: of the namespace; another one for each server, and after a server lost its data.
            formerly: the id that the caller held before its server lost its data.

        Raises:
            SetupError: another server did so less than a minute ago.
        """
        holder = (await connection.execute(_HOLDER)).one_or_none()
        is_other = holder is not None and holder.namespace_id not in (namespace_id, formerly)
        # In the future where the clock was set back: that is stale as well, or nobody could hold it until then.
        if holder is not None and is_other and abs(holder.seconds) < HELD_FOR.total_seconds():
            raise SetupError(
                f"another Temporal server runs this database's workflows (namespace {holder.namespace_id}, seen"
                f" {holder.seconds:.0f} s ago; this one is {namespace_id}): two would judge and train everything"
                " twice. Stop that installation, or wait a minute if it has stopped, or use another database; if its"
                " Temporal lost its data, run `clawloop recover`"
            )
        await connection.execute(_HOLD, {"namespace_id": namespace_id})

    @transaction
    async def seen_at(self, connection: AsyncConnection) -> datetime | None:
        """When a server last said that it runs the workflows, by PostgreSQL's clock; None if none ever did."""
        return (await connection.execute(_SEEN_AT)).scalar_one_or_none()

    @transaction
    async def take(self, connection: AsyncConnection, namespace_id: str) -> None:
        """As `hold`, whoever did so before: an operator knows that it is gone."""
        await connection.execute(_HOLD, {"namespace_id": namespace_id})

    @transaction
    async def release(self, connection: AsyncConnection, namespace_id: str) -> None:
        """Leave the database to any server at once."""
        await connection.execute(_RELEASE, {"namespace_id": namespace_id})
