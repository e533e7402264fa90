"""Counts over all policies, for people."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.operations.overview import ServiceCounts
from db.database import PostgresStore, transaction

_HAS_CHATS = "EXISTS (SELECT FROM turns t WHERE t.session_id = s.id AND t.kind = 'main')"
_COUNTS = text(f"""
    SELECT ARRAY(SELECT id FROM policies ORDER BY id) AS policies,
        (SELECT count(*) FROM sessions s WHERE {_HAS_CHATS}) AS sessions,
        (SELECT count(*) FROM sessions s WHERE state <> 'closed' AND {_HAS_CHATS}) AS open_sessions,
        (SELECT max(last_turn_at) FROM sessions) AS newest_turn_at,
        (SELECT count(*) FROM turns WHERE outcome = 'waiting') AS waiting,
        (SELECT count(*) FROM turns WHERE announced_at IS NULL AND kind = 'main' AND episode_id IS NULL
            AND entered_at < now() - interval '2 minutes') AS late
""")
_POLICIES_IN_USE = text("SELECT DISTINCT policy FROM sessions LIMIT 2")


class PostgresOverviewStore(PostgresStore):
    @transaction
    async def counts(self, connection: AsyncConnection) -> ServiceCounts:
        row = (await connection.execute(_COUNTS)).one()
        return ServiceCounts(
            tuple(row.policies), row.sessions, row.open_sessions, row.newest_turn_at, row.waiting, row.late
        )

    @transaction
    async def policy_in_use(self, connection: AsyncConnection) -> str:
        """The policy whose sessions are all that there are; `default` where there are none, or several have some."""
        found = (await connection.execute(_POLICIES_IN_USE)).scalars().all()
        return found[0] if len(found) == 1 else "default"
