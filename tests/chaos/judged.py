"""Whether each reply that a later message follows was judged, once nobody chats any more.

`clawloop check` cannot say so: a turn may wait while its session is open, and no chatting session closes here.
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

# Every outcome but this one is a decision, with a reason.
_WAITING = """
    SELECT t.id::text, t.session_id::text, count(*), bool_or(c.announced_at IS NOT NULL)
    FROM turns t JOIN turns c ON c.parent_turn_id = t.id AND c.session_id = t.session_id
    WHERE t.outcome = 'waiting' AND t.kind = 'main' AND c.kind = 'main'
    GROUP BY t.id ORDER BY t.id
"""
_JUDGED = """
    SELECT count(*) FROM turns t WHERE t.kind = 'main' AND t.outcome <> 'waiting'
        AND EXISTS (SELECT FROM turns c WHERE c.parent_turn_id = t.id AND c.kind = 'main')
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


async def judged_turns(database_url: str) -> int:
    """How many main turns that another one follows were judged."""
    ((count,),) = await _rows(database_url, _JUDGED)
    return int(count)


async def _rows(database_url: str, query: str) -> Sequence[TupleRow]:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        return await (await connection.execute(query)).fetchall()
