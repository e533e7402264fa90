"""Practice while faults come: no client sees a practised reply, and it ends with the request that it repeats.

That it is stored and trained once the ledger's invariants say, which each check reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg

from clawloop.core.ids import turn_id_of
from tests.chaos.chatters import Seen

_SEEN = """
    SELECT 'a client got practised turn ' || id FROM turns WHERE id = ANY(%(seen)s::uuid[]) AND kind = 'practice'
    UNION ALL
    SELECT 'turn ' || t.id || ' continues practised turn ' || p.id FROM turns t JOIN turns p ON p.id = t.parent_turn_id
    WHERE p.kind = 'practice'
    UNION ALL
    SELECT 'practised turn ' || p.id || ' is found by its conversation' FROM session_prefixes s
        JOIN turns p ON p.id = s.turn_id
    WHERE p.kind = 'practice'
"""
_STATES = """
    SELECT s.state, count(*) FROM turns t JOIN samples s ON s.turn_id = t.id WHERE t.kind = 'practice' GROUP BY 1
"""
_MOST_PRACTISED = """
    SELECT session_id::text FROM turns WHERE kind = 'practice' GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 1
"""
_LEFT = """
    SELECT 'practised turn ' || t.id || ' is left of erased session ' || t.session_id FROM turns t
    WHERE t.session_id = %(session)s AND t.kind = 'practice' AND (t.outcome <> 'erased'
        OR t.response_ids IS NOT NULL
        OR EXISTS (SELECT FROM samples s WHERE s.turn_id = t.id AND octet_length(s.hinted_prompts) > 0))
"""


async def seen_practice(database_url: str, seen: Sequence[Seen]) -> list[str]:
    """Practised turns that clients got, or that a conversation holds: one line each."""
    return [line for (line,) in await _rows(database_url, _SEEN, seen=[turn_id_of(one.response_id) for one in seen])]


async def practised_samples(database_url: str) -> Counter[str]:
    """How many practised replies have a sample in which state."""
    return Counter({state: int(count) for state, count in await _rows(database_url, _STATES)})


async def most_practised_session(database_url: str) -> str | None:
    """The session of which most requests were practised; None: nothing was."""
    rows = await _rows(database_url, _MOST_PRACTISED)
    return str(rows[0][0]) if rows else None


async def oldest_lesson(database_url: str) -> str | None:
    """The oldest lesson that is not erased; None: there is none."""
    rows = await _rows(database_url, "SELECT id::text FROM lessons WHERE state <> 'erased' ORDER BY id LIMIT 1")
    return str(rows[0][0]) if rows else None


async def left_of_erased(database_url: str, session: str) -> list[str]:
    """What is left of the practised replies to an erased session's requests: one line each."""
    return [line for (line,) in await _rows(database_url, _LEFT, session=session)]


async def _rows(database_url: str, query: str, **values: object) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        return await (await connection.execute(query, values)).fetchall()
