"""Stores which Temporal server runs this database's workflows, so that a second one is refused.

Two servers would each start a training workflow and a sweep for the same rows: everything would be judged and trained
by both, the second without the first one's files. PostgreSQL's clock alone decides, so that no worker's clock matters.

Another server, or one that lost its data, knows nothing of what was signalled to the former one. The transaction that
notes it marks all that waits as never signalled: exactly once for each server that was lost, however processes end.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Double, Row, cast, extract, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import WaitingWork
from clawloop.core.errors import SetupError
from db.database import PostgresStore, transaction
from db.recovery import forget_signals
from db.tables import TemporalServerRow

RENEW_EVERY = timedelta(seconds=15)
# Orchestrators that are alive miss no three renewals; one that is gone for longer has left the database to others.
HELD_FOR = timedelta(seconds=60)


class TemporalServerStore(PostgresStore):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    @transaction
    async def hold(
        self, connection: AsyncConnection, namespace_id: str, formerly: str | None = None
    ) -> WaitingWork | None:
        """Note that this server runs the workflows now.

        Args:
            namespace_id: id of the Temporal namespace; it differs between servers, and after a server lost its data.
            formerly: the id that the caller held before its server lost its data.

        Returns:
            The work that the sweep signals again, if this call noted a different server; else None.

        Raises:
            SetupError: another server noted the same less than a minute ago.
        """
        holder = await _locked_holder(connection, namespace_id)
        is_other = holder.namespace_id not in (namespace_id, formerly)
        # `seen_at` is in the future if the clock was set back: stale too, or the database could not be held until then.
        if is_other and abs(holder.seconds) < HELD_FOR.total_seconds():
            raise SetupError(
                f"another Temporal server runs this database's workflows (namespace {holder.namespace_id}, seen"
                f" {holder.seconds:.0f} s ago; this one is {namespace_id}): two would judge and train everything"
                " twice. Stop that installation, or wait a minute if it has stopped or its Temporal lost its data"
                " (`clawloop recover` saves the minute), or use another database"
            )
        return await _change_holder(connection, holder.namespace_id, namespace_id)

    @transaction
    async def seen_at(self, connection: AsyncConnection) -> datetime | None:
        """Last time a server noted that it runs the workflows, by PostgreSQL's clock; None if no server ever did."""
        return (await connection.execute(select(TemporalServerRow.seen_at))).scalar_one_or_none()

    @transaction
    async def take(self, connection: AsyncConnection, namespace_id: str) -> WaitingWork | None:
        """Hold the database for this server, whichever held it: an operator knows that the former server is gone."""
        holder = await _locked_holder(connection, namespace_id)
        return await _change_holder(connection, holder.namespace_id, namespace_id)

    @transaction
    async def release(self, connection: AsyncConnection, namespace_id: str) -> None:
        """Leave the database to any server at once."""
        own = update(TemporalServerRow).where(TemporalServerRow.namespace_id == namespace_id)
        # Older than HELD_FOR, so that another server need not wait. An orchestrator of the same server renews it again.
        await connection.execute(own.values(seen_at=func.now() - timedelta(days=1)))


async def _locked_holder(connection: AsyncConnection, namespace_id: str) -> Row[Any]:
    """The locked row of the server that holds the database: this one, if no server held it before."""
    # Waits for another server that is the first one at the same moment.
    await connection.execute(insert(TemporalServerRow).values(namespace_id=namespace_id).on_conflict_do_nothing())
    seconds = cast(extract("epoch", func.now() - TemporalServerRow.seen_at), Double).label("seconds")
    return (await connection.execute(select(TemporalServerRow.namespace_id, seconds).with_for_update())).one()


async def _change_holder(connection: AsyncConnection, before: str, namespace_id: str) -> WaitingWork | None:
    await connection.execute(update(TemporalServerRow).values(namespace_id=namespace_id, seen_at=func.now()))
    return None if before == namespace_id else await forget_signals(connection)
