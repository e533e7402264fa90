"""Turns of a session that steps have learned from."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import TurnResult
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import SessionId, TurnId

# A sample may have been in steps that were given up before.
_TRAINED = text("""
    WITH numbered AS (
        SELECT id, outcome, outcome_detail, row_number() OVER (ORDER BY id) AS number
        FROM turns WHERE session_id = :session AND kind = 'main'),
    newest AS (
        SELECT * FROM numbered WHERE outcome IN ('trained', 'rolled_back') ORDER BY id DESC LIMIT :limit)
    SELECT n.id, n.number, n.outcome, n.outcome_detail, l.verdict, l.step
    FROM newest n CROSS JOIN LATERAL (
        SELECT j.verdict, m.step FROM samples s JOIN judgements j ON j.id = s.judgement_id
            JOIN step_samples m ON m.sample_id = s.id JOIN steps p ON p.policy = m.policy AND p.n = m.step
        WHERE s.turn_id = n.id AND s.state = 'trained' AND p.state = 'committed'
        ORDER BY m.step DESC LIMIT 1) l
    ORDER BY n.id
""")


async def read_trained(connection: AsyncConnection, session: SessionId, limit: int) -> list[TurnResult]:
    """The newest `limit` main turns that were trained, whether rolled back since or not, in their order."""
    return [
        TurnResult(
            turn_id=TurnId(row.id),
            number=row.number,
            kind=TurnKind.MAIN,
            outcome=TurnOutcome(row.outcome),
            verdict=row.verdict,
            sample=True,
            step=row.step,
            why=(row.outcome == TurnOutcome.ROLLED_BACK and row.outcome_detail) or f"trained in step {row.step}",
        )
        for row in await connection.execute(_TRAINED, {"session": session, "limit": limit})
    ]
