"""Whether each reply that a later message follows was judged, and each session that its client ended is closed.

`clawloop check` cannot say so: a turn may wait while its session is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import psycopg
from psycopg.rows import TupleRow

# Longer than anything that is still under way: the sweep signals a turn again within 90 s, a session's workflow gives a
# judge up after about 8 minutes (`workflows/activity_options.py`) and then decides by the votes that are stored.
JUDGED_SECONDS = 600.0

# The next main turns below each; side turns between do not count.
_FOLLOWED = """
    WITH RECURSIVE down AS (
        SELECT w.id AS turn_id, t.id, t.kind, t.announced_at FROM turns w JOIN turns t ON t.parent_turn_id = w.id
        WHERE w.kind = 'main'
        UNION ALL
        SELECT d.turn_id, t.id, t.kind, t.announced_at FROM down d JOIN turns t ON t.parent_turn_id = d.id
        WHERE d.kind = 'side')
"""
# Every outcome but this one is a decision, with a reason.
_WAITING = f"""{_FOLLOWED}
    SELECT t.id::text, t.session_id::text, count(*), bool_or(d.announced_at IS NOT NULL)
    FROM turns t JOIN down d ON d.turn_id = t.id AND d.kind = 'main'
    WHERE t.outcome = 'waiting'
    GROUP BY t.id ORDER BY t.id
"""
_JUDGED = f"""{_FOLLOWED}
    SELECT count(DISTINCT t.id) FROM turns t JOIN down d ON d.turn_id = t.id AND d.kind = 'main'
    WHERE t.outcome <> 'waiting'
"""

_LEFT_OPEN = """
    SELECT s.id::text, e.name, coalesce(s.state, 'not stored')
    FROM unnest(%s::text[]) AS e(name) LEFT JOIN sessions s ON s.external_id = e.name
    WHERE s.state IS DISTINCT FROM 'closed'
    ORDER BY e.name
"""


async def lost_judgements(database_url: str, within_seconds: float = JUDGED_SECONDS) -> list[str]:
    """The main turns that another one follows, and that are not judged within this time: one line each."""
    deadline = time.monotonic() + within_seconds
    while waiting := await _rows(database_url, _WAITING):
        if time.monotonic() > deadline:
            return [
                f"turn {turn} of session {session} is not judged: {followed} main turns follow it, "
                + ("which its workflow was told" if announced else "none of which its workflow was told")
                for turn, session, followed, announced in waiting
            ]
        await asyncio.sleep(0.2)
    return []


async def sessions_left_open(
    database_url: str, ended: Sequence[str], within_seconds: float = JUDGED_SECONDS
) -> list[str]:
    """Those of the ended sessions that are not closed within this time: one line each."""
    deadline = time.monotonic() + within_seconds
    while left := await _rows(database_url, _LEFT_OPEN, [*ended]):
        if time.monotonic() > deadline:
            return [
                f"session {session} ({name}) was ended by its client, and is {state}" for session, name, state in left
            ]
        await asyncio.sleep(0.2)
    return []


async def judged_turns(database_url: str) -> int:
    """How many main turns that another one follows were judged."""
    ((count,),) = await _rows(database_url, _JUDGED)
    return int(count)


async def _rows(database_url: str, query: str, *values: object) -> Sequence[TupleRow]:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        return await (await connection.execute(query, values)).fetchall()
