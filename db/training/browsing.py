"""Reads what a version was trained on, what happened to a policy, and what changed since the last look."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.browsing import Counts, PolicyEvent, ReplyFigures, TrainedReply
from clawloop.ids import SampleId, SessionId, TurnId
from db.content import content_of, plain_length
from db.database import Database, transaction
from db.exact_json import storable
from db.training.policies import require_policy

_BATCH = text("""
    SELECT m.place, m.dropped, m.without_hint, s.id AS sample_id, s.reward, j.id AS judgement, j.verdict, j.hint, t.id,
        t.session_id, t.version, t.messages_added, t.response,
        (SELECT count(*) FROM turns o WHERE o.session_id = t.session_id AND o.kind = 'main' AND o.id <= t.id) AS number
    FROM step_samples m JOIN samples s ON s.id = m.sample_id JOIN judgements j ON j.id = s.judgement_id
        JOIN turns t ON t.id = s.turn_id
    WHERE m.policy = :policy AND m.step = :step ORDER BY m.place
""")
_EVENTS = text("SELECT kind, detail, at FROM events WHERE policy = :policy ORDER BY id DESC LIMIT :limit")
_REPLIES = text(f"""
    SELECT t.started_at, t.version, j.verdict, {plain_length("t.response_ids")} / 4 AS tokens
    FROM turns t JOIN sessions c ON c.id = t.session_id
    LEFT JOIN LATERAL (
        SELECT verdict FROM judgements WHERE turn_id = t.id AND decided_at IS NOT NULL
        ORDER BY revision DESC, decided_at DESC LIMIT 1) j ON true
    WHERE c.policy = :policy AND t.kind = 'main' AND t.response_ids IS NOT NULL
    ORDER BY t.id DESC LIMIT :limit
""")
_COUNTED_TURNS = 100_000
_OUTCOMES = text("""
    SELECT outcome, count(*) AS turns FROM (
        SELECT t.outcome FROM turns t JOIN sessions c ON c.id = t.session_id
        WHERE c.policy = :policy ORDER BY t.id DESC LIMIT :limit) newest
    GROUP BY outcome
""")
_COUNTS = text("""
    SELECT (SELECT count(*) FROM sessions WHERE policy = :policy) AS sessions,
        (SELECT count(*) FROM samples WHERE policy = :policy AND state = 'quarantined') AS quarantined
""")
# Row by row what the page shows as it is now. The newest judgements are looked at for the decisions among them.
_MARK = text("""
    SELECT md5(concat_ws('|',
        (SELECT id FROM turns ORDER BY id DESC LIMIT 1), (SELECT id FROM judgements ORDER BY id DESC LIMIT 1),
        (SELECT id FROM samples ORDER BY id DESC LIMIT 1), (SELECT id FROM events ORDER BY id DESC LIMIT 1),
        (SELECT id FROM feedback ORDER BY id DESC LIMIT 1),
        (SELECT count(decided_at) FROM (SELECT decided_at FROM judgements ORDER BY id DESC LIMIT 100) j),
        (SELECT string_agg(concat_ws(',', id, head, active, epoch, pinned, paused_reason, recipe_hash, verdict_count),
            ';' ORDER BY id) FROM policies),
        (SELECT string_agg(concat_ws(',', policy, n, state, attempt, progress), ';' ORDER BY policy, n)
            FROM (SELECT * FROM steps ORDER BY claimed_at DESC LIMIT 20) s),
        (SELECT string_agg(concat_ws(',', id, state), ';' ORDER BY id)
            FROM (SELECT * FROM rollout_groups ORDER BY id DESC LIMIT 20) g),
        (SELECT string_agg(concat_ws(',', id, state, ending, reward, advantage), ';' ORDER BY id)
            FROM (SELECT * FROM episodes ORDER BY id DESC LIMIT 50) e),
        (SELECT string_agg(concat_ws(',', id, draining, problem), ';' ORDER BY id) FROM engines),
        (SELECT count(*) FROM engine_versions)))
""")


class PostgresTrainingBrowser:
    """Satisfies `api.ports.TrainingBrowser`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def batch(self, connection: AsyncConnection, policy: str, step: int) -> list[TrainedReply]:
        rows = await connection.execute(_BATCH, {"policy": storable(policy), "step": step})
        content = content_of(connection)
        return [
            TrainedReply(
                sample_id=SampleId(row.sample_id),
                turn_id=TurnId(row.id),
                session_id=SessionId(row.session_id),
                number=row.number,
                answered_by=row.version,
                added=content.read_json(row.messages_added, "turns.messages_added", row.id),
                response=content.read_json(row.response, "turns.response", row.id),
                verdict=row.verdict,
                reward=row.reward,
                hint=content.read_text(row.hint, "judgements.hint", row.judgement),
                dropped=row.dropped,
                without_hint=row.without_hint,
            )
            for row in rows
        ]

    @transaction
    async def events(self, connection: AsyncConnection, policy: str, limit: int) -> list[PolicyEvent]:
        rows = await connection.execute(_EVENTS, {"policy": storable(policy), "limit": limit})
        return [PolicyEvent(row.kind, row.detail, row.at) for row in rows]

    @transaction
    async def replies(self, connection: AsyncConnection, policy: str, limit: int) -> list[ReplyFigures]:
        rows = await connection.execute(_REPLIES, {"policy": storable(policy), "limit": limit})
        return [ReplyFigures(row.started_at, row.version, row.verdict, row.tokens) for row in reversed(rows.all())]

    @transaction
    async def counts(self, connection: AsyncConnection, policy: str) -> Counts:
        await require_policy(connection, policy)
        parameters = {"policy": storable(policy)}
        outcomes = await connection.execute(_OUTCOMES, parameters | {"limit": _COUNTED_TURNS})
        row = (await connection.execute(_COUNTS, parameters)).one()
        return Counts(row.sessions, {outcome.outcome: outcome.turns for outcome in outcomes}, row.quarantined)

    @transaction
    async def mark(self, connection: AsyncConnection) -> str:
        found: str = (await connection.execute(_MARK)).scalar_one()
        return found
