"""Counts over all policies, for people."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.operations.overview import ServiceCounts
from db.database import PostgresStore, transaction

_COUNTS = text("""
    SELECT ARRAY(SELECT id FROM policies ORDER BY id) AS policies,
        (SELECT count(*) FROM sessions) AS sessions,
        (SELECT count(*) FROM sessions WHERE state <> 'closed') AS open_sessions,
        (SELECT max(last_turn_at) FROM sessions) AS newest_turn_at,
        (SELECT count(*) FROM turns WHERE outcome = 'waiting') AS waiting,
        (SELECT count(*) FROM turns WHERE announced_at IS NULL AND kind = 'main' AND episode_id IS NULL
            AND entered_at < now() - interval '2 minutes') AS late
""")


class PostgresOverviewStore(PostgresStore):
    @transaction
    async def counts(self, connection: AsyncConnection) -> ServiceCounts:
        row = (await connection.execute(_COUNTS)).one()
        return ServiceCounts(
            tuple(row.policies), row.sessions, row.open_sessions, row.newest_turn_at, row.waiting, row.late
        )
