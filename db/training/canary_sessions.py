"""Reads the judged sessions that a canary is decided by, in the caller's transaction."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from db.training.schedule import first_id

# The newest verdict of each turn; a session that both versions answered is an observation of each. The parent may have
# become the active version after the canary began: then those before are of an older one, and no comparison.
_SESSIONS = text("""
    SELECT t.version = :canary AS of_canary, avg(j.verdict)::float8 AS mean
    FROM turns t JOIN sessions s ON s.id = t.session_id
        CROSS JOIN LATERAL (
            SELECT verdict FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
            ORDER BY revision DESC LIMIT 1) j
    WHERE s.policy = :policy AND t.id >= :first AND t.kind = 'main' AND t.started_at >= greatest(:since, (
            SELECT v.activated_at FROM versions v WHERE v.policy = :policy AND v.n = :other))
        AND t.episode_id IS NULL AND t.version IN (:canary, :other) AND j.verdict IS NOT NULL
    GROUP BY t.session_id, t.version
""")


async def read_canary_sessions(
    connection: AsyncConnection, policy: str, canary: int, other: int, since: datetime
) -> tuple[list[float], list[float]]:
    """The mean verdict of each judged session, −1 to 1: of the canary, and of the version before.

    Args:
        other: the version before.
        since: when the canary began.
    """
    parameters = {"policy": policy, "canary": canary, "other": other, "since": since, "first": first_id(since)}
    found = (await connection.execute(_SESSIONS, parameters)).all()
    return [row.mean for row in found if row.of_canary], [row.mean for row in found if not row.of_canary]
