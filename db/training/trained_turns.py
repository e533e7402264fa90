"""Turns of a session that steps have learned from."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.ids import SessionId, TurnId
from clawloop.judging.records import TrainedTurn

# A sample may have been in steps that were given up before.
_TRAINED = text("""
    WITH numbered AS (
        SELECT id, outcome, outcome_detail, row_number() OVER (ORDER BY id) AS number
        FROM turns WHERE session_id = :session AND kind = 'main'),
    newest AS (
        SELECT * FROM numbered WHERE outcome IN ('trained', 'rolled_back') ORDER BY id DESC LIMIT :limit)
    SELECT n.id, n.number, l.verdict, l.step, CASE n.outcome WHEN 'rolled_back' THEN n.outcome_detail END AS rolled_back
    FROM newest n CROSS JOIN LATERAL (
        SELECT j.verdict, m.step FROM samples s JOIN judgements j ON j.id = s.judgement_id
            JOIN step_samples m ON m.sample_id = s.id JOIN steps p ON p.policy = m.policy AND p.n = m.step
        WHERE s.turn_id = n.id AND s.state = 'trained' AND p.state = 'committed'
        ORDER BY m.step DESC LIMIT 1) l
    ORDER BY n.id
""")


async def read_trained(session: SessionId, limit: int, connection: AsyncConnection) -> list[TrainedTurn]:
    """The newest `limit` main turns that were trained, whether rolled back since or not, in their order."""
    rows = await connection.execute(_TRAINED, {"session": session, "limit": limit})
    return [TrainedTurn(TurnId(row.id), row.number, row.verdict, row.step, row.rolled_back) for row in rows]
