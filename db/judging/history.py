"""Comparisons of stored turns' verdicts with those of another judge or recipe, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.ids import TurnId
from clawloop.judging.agreement import Pair
from clawloop.operations.history import HistoryKey, HistoryTurn, NewVerdict
from db.database import Database, transaction
from db.tables import ComparisonRow

_NEWEST = """
    CROSS JOIN LATERAL (
        SELECT j.verdict, j.decided_at FROM judgements j WHERE j.turn_id = t.id AND j.decided_at IS NOT NULL
        ORDER BY j.revision DESC, j.decided_at DESC LIMIT 1) newest
"""
# A rating decides without a judge, so there is nothing to compare.
_UNRATED = "NOT EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id AND f.score IS NOT NULL)"
# An episode's turn cannot be judged again: only its rollout group decides its reward.
_OF_CHATS = "t.episode_id IS NULL"
_WAITING = f"""
    FROM turns t JOIN sessions s ON s.id = t.session_id {_NEWEST}
    WHERE s.policy = :policy AND {_OF_CHATS} AND t.kind = 'main' AND t.outcome <> 'erased'
        AND newest.verdict IS NOT NULL AND {_UNRATED}
        AND NOT EXISTS (SELECT FROM comparisons c
            WHERE c.turn_id = t.id AND c.signal_hash = :signal_hash AND c.judge = :judge)
"""
_NEXT = text(f"SELECT t.id, t.version, newest.verdict {_WAITING} ORDER BY t.id LIMIT :limit")
_LEFT = text(f"SELECT count(*) {_WAITING}")
_COMPARED = f"s.policy = :policy AND {_OF_CHATS} AND c.signal_hash = :signal_hash AND c.judge = :judge"
_PAIRS = text(f"""
    SELECT t.version, c.before, c.after
    FROM comparisons c JOIN turns t ON t.id = c.turn_id JOIN sessions s ON s.id = t.session_id
    WHERE {_COMPARED}
""")
# The verdict may have changed while the other judge was asked, too: before its answer was stored.
_DIFFERING = text(f"""
    SELECT c.turn_id
    FROM comparisons c JOIN turns t ON t.id = c.turn_id JOIN sessions s ON s.id = t.session_id {_NEWEST}
    WHERE {_COMPARED} AND c.after IS NOT NULL AND c.after <> c.before AND c.applied_at IS NULL
        AND newest.verdict = c.before AND newest.decided_at <= c.compared_at AND {_UNRATED}
    ORDER BY c.turn_id
""")


class PostgresHistoryStore:
    """Satisfies `clawloop.operations.history.HistoryStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def next_turns(self, connection: AsyncConnection, key: HistoryKey, limit: int) -> list[HistoryTurn]:
        rows = await connection.execute(_NEXT, _parameters(key) | {"limit": limit})
        return [HistoryTurn(TurnId(row.id), row.version, row.verdict) for row in rows]

    @transaction
    async def left(self, connection: AsyncConnection, key: HistoryKey) -> int:
        count: int = (await connection.execute(_LEFT, _parameters(key))).scalar_one()
        return count

    @transaction
    async def record(self, connection: AsyncConnection, key: HistoryKey, turn: HistoryTurn, new: NewVerdict) -> None:
        row = insert(ComparisonRow).values(
            turn_id=turn.turn_id,
            signal_hash=key.signal_hash,
            judge=key.judge,
            before=turn.verdict,
            after=new.verdict,
            why=new.why,
        )
        await connection.execute(row.on_conflict_do_nothing())

    @transaction
    async def pairs(self, connection: AsyncConnection, key: HistoryKey) -> list[Pair]:
        rows = await connection.execute(_PAIRS, _parameters(key))
        return [Pair(row.version, row.before, row.after) for row in rows]

    @transaction
    async def differing(self, connection: AsyncConnection, key: HistoryKey) -> list[TurnId]:
        return [TurnId(row.turn_id) for row in await connection.execute(_DIFFERING, _parameters(key))]

    @transaction
    async def mark_applied(self, connection: AsyncConnection, key: HistoryKey, turns: Sequence[TurnId]) -> None:
        own = (ComparisonRow.signal_hash == key.signal_hash, ComparisonRow.judge == key.judge)
        marked = update(ComparisonRow).where(*own, ComparisonRow.turn_id.in_(turns))
        await connection.execute(marked.values(applied_at=text("now()")))


def _parameters(key: HistoryKey) -> dict[str, object]:
    return {"policy": key.policy, "signal_hash": key.signal_hash, "judge": key.judge}
