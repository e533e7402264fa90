"""Whether each reply that a later message follows was judged, and each session that its client ended is closed.

`clawloop check` cannot say so: a turn may wait while its session is open.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import psycopg
from psycopg.rows import TupleRow

from clawloop.core.contracts.turns import TurnOutcome

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
# A closing session gives one of the other two to a turn that no judge was asked about, or that nothing was known to
# follow.
NOT_JUDGED = (TurnOutcome.WAITING, TurnOutcome.UNJUDGED, TurnOutcome.NO_FEEDBACK)
_NOT_JUDGED = f"""{_FOLLOWED}
    SELECT t.id::text, t.session_id::text, t.outcome, count(*), bool_or(d.announced_at IS NOT NULL)
    FROM turns t JOIN down d ON d.turn_id = t.id AND d.kind = 'main'
    WHERE t.outcome = ANY(%s)
    GROUP BY t.id ORDER BY t.id
"""
_OUTCOMES = f"""{_FOLLOWED}
    SELECT t.outcome, count(DISTINCT t.id) FROM turns t JOIN down d ON d.turn_id = t.id AND d.kind = 'main'
    GROUP BY t.outcome ORDER BY t.outcome
"""

_LEFT_OPEN = """
    SELECT s.id::text, e.name, coalesce(s.state, 'not stored'), t.outcome, t.announced_at::text
    FROM unnest(%s::text[]) AS e(name) LEFT JOIN sessions s ON s.external_id = e.name
    LEFT JOIN LATERAL (
        SELECT outcome, announced_at FROM turns WHERE session_id = s.id AND kind = 'main' ORDER BY id DESC LIMIT 1) t
        ON true
    WHERE s.state IS DISTINCT FROM 'closed'
    ORDER BY e.name
"""


async def lost_judgements(database_url: str, within_seconds: float = JUDGED_SECONDS) -> list[str]:
    """The main turns that another one follows, and that no judge's votes decide within this time: one line each."""
    deadline = time.monotonic() + within_seconds
    while lost := await _rows(database_url, _NOT_JUDGED, [*NOT_JUDGED]):
        if time.monotonic() > deadline or all(outcome != TurnOutcome.WAITING for _, _, outcome, _, _ in lost):
            return [
                f"turn {turn} of session {session} is {outcome}: {followed} main turns follow it, "
                + ("which its workflow was told" if announced else "none of which its workflow was told")
                for turn, session, outcome, followed, announced in lost
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
                f"session {session} ({name}) was ended by its client, and is {state}; last turn: {outcome}, "
                + ("its workflow was not told" if announced is None else f"its workflow told at {announced}")
                for session, name, state, outcome, announced in left
            ]
        await asyncio.sleep(0.2)
    return []


async def followed_turns(database_url: str) -> Counter[TurnOutcome]:
    """How many main turns that another one follows have which outcome."""
    return Counter({TurnOutcome(outcome): int(count) for outcome, count in await _rows(database_url, _OUTCOMES)})


async def judged_turns(database_url: str) -> int:
    """How many of them were judged."""
    outcomes = await followed_turns(database_url)
    return sum(count for outcome, count in outcomes.items() if outcome not in NOT_JUDGED)


async def _rows(database_url: str, query: str, *values: object) -> Sequence[TupleRow]:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        return await (await connection.execute(query, values)).fetchall()
