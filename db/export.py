"""Reads the records of an export from PostgreSQL, in pages."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import exists, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import Message
from clawloop.core.contracts.views import TaughtHint
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.judging.next_state_lookup import find_next_state
from clawloop.core.judging.records import VOTES, TurnContext
from clawloop.operations.export import ExportedJudgement, ExportedTurn, ExportFilter, Record
from db.content import answer_row, storable
from db.database import Database, PostgresStore, transaction
from db.judging.judgements import PostgresJudgementStore
from db.judging.tables import HINT_SOURCE, newest_judgement
from db.lessons.ledger import PRACTISED_WITH, TURNS_WITH
from db.tables import PolicyRow
from db.turns.files import PostgresFileStore

_TURNS = text(f"""
    SELECT t.id, s.id AS session, s.external_id, j.id AS judgement, j.verdict, j.reward, j.hint, {HINT_SOURCE}, j.why,
        ARRAY(SELECT v.score FROM votes v WHERE v.judgement_id = j.id AND v.kind = :votes ORDER BY v.index) AS scores,
        ARRAY(SELECT v.raw FROM votes v WHERE v.judgement_id = j.id AND v.kind = :votes ORDER BY v.index) AS answers,
        ARRAY(SELECT v.index FROM votes v WHERE v.judgement_id = j.id AND v.kind = :votes ORDER BY v.index) AS places
    FROM turns t JOIN sessions s ON s.id = t.session_id
        LEFT JOIN LATERAL {newest_judgement("t.id")} j ON true
    WHERE t.kind = 'main' AND t.outcome <> 'erased' AND (j.id IS NOT NULL OR NOT :judged)
        AND (CAST(:policy AS text) IS NULL OR s.policy = :policy)
        AND (CAST(:session AS uuid) IS NULL OR s.id = :session)
        AND (CAST(:since AS timestamptz) IS NULL OR t.started_at >= :since)
        AND (CAST(:until AS timestamptz) IS NULL OR t.started_at < :until)
        AND (CAST(:after AS uuid) IS NULL OR t.id > :after)
    ORDER BY t.id LIMIT :limit
""")
_SAMPLES = text(f"""
    SELECT p.id, p.policy, p.turn_id AS turn, t.session_id AS session, p.state, p.reason, p.reward,
        p.hinted_prompts IS NOT NULL AS hinted, {HINT_SOURCE}, p.created_at,
        (SELECT max(m.step) FROM step_samples m WHERE m.sample_id = p.id) AS step
    FROM samples p JOIN turns t ON t.id = p.turn_id JOIN judgements j ON j.id = p.judgement_id
    WHERE (CAST(:policy AS text) IS NULL OR p.policy = :policy)
        AND (CAST(:session AS uuid) IS NULL OR t.session_id = :session)
        AND (CAST(:since AS timestamptz) IS NULL OR p.created_at >= :since)
        AND (CAST(:until AS timestamptz) IS NULL OR p.created_at < :until)
        AND (CAST(:after AS uuid) IS NULL OR p.id > :after)
    ORDER BY p.id LIMIT :limit
""")
# A step has no id of its own: this one is the same in each export, and sorts by when the step was claimed.
_STEPS = text("""
    WITH identified AS (
        SELECT CAST(lpad(to_hex(CAST(extract(epoch FROM claimed_at) * 1000 AS bigint)), 12, '0')
            || substr(md5(policy || '/' || n), 1, 20) AS uuid) AS id, * FROM steps)
    SELECT i.id, i.policy, i.n, i.parent, i.state, i.reason, i.recipe_hash, i.lr_scale, i.metrics,
        i.claimed_at, i.finished_at,
        ARRAY(SELECT CAST(m.sample_id AS text) FROM step_samples m
            WHERE m.policy = i.policy AND m.step = i.n ORDER BY m.place) AS samples
    FROM identified i
    WHERE (CAST(:policy AS text) IS NULL OR i.policy = :policy)
        AND (CAST(:session AS uuid) IS NULL OR EXISTS (
            SELECT FROM step_samples m JOIN samples p ON p.id = m.sample_id JOIN turns t ON t.id = p.turn_id
            WHERE m.policy = i.policy AND m.step = i.n AND t.session_id = :session))
        AND (CAST(:since AS timestamptz) IS NULL OR i.claimed_at >= :since)
        AND (CAST(:until AS timestamptz) IS NULL OR i.claimed_at < :until)
        AND (CAST(:after AS uuid) IS NULL OR i.id > :after)
    ORDER BY i.id LIMIT :limit
""")
_LESSONS = text(f"""
    SELECT l.id, l.policy, l.text, l.state, l.why, l.source, l.turn_id AS turn, l.shown_by AS said_in, l.superseded_by,
        l.since_version, l.created_at, l.changed_at, {TURNS_WITH} AS turns, {PRACTISED_WITH} AS practised
    FROM lessons l
    WHERE l.state <> 'erased' AND (CAST(:policy AS text) IS NULL OR l.policy = :policy)
        AND (CAST(:session AS uuid) IS NULL OR EXISTS (
            SELECT FROM turns t WHERE t.id IN (l.turn_id, l.shown_by) AND t.session_id = :session))
        AND (CAST(:since AS timestamptz) IS NULL OR l.created_at >= :since)
        AND (CAST(:until AS timestamptz) IS NULL OR l.created_at < :until)
        AND (CAST(:after AS uuid) IS NULL OR l.id > :after)
    ORDER BY l.id LIMIT :limit
""")


class PostgresExportStore(PostgresStore):
    """Implements `clawloop.operations.export.ExportStore`."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._contexts = PostgresJudgementStore(database)
        self._files = PostgresFileStore(database)

    @transaction
    async def has_policy(self, connection: AsyncConnection, policy: str) -> bool:
        return bool(await connection.scalar(select(exists().where(PolicyRow.id == storable(policy)))))

    async def turns(
        self, wanted: ExportFilter, after: UUID | None, limit: int, *, judged: bool
    ) -> tuple[list[ExportedTurn], UUID | None]:
        rows = await self._rows(_TURNS, _parameters(wanted, after, limit) | {"judged": judged, "votes": VOTES})
        found = [await self._exported(row) for row in rows]
        return [turn for turn in found if turn is not None], rows[-1].id if rows else None

    async def files(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        return await self._files.of_session(session, sha256s)

    async def samples(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        rows = await self._rows(_SAMPLES, _parameters(wanted, after, limit))
        return [_plain(row) | {"hint_source": row.hint_source if row.hinted else None} for row in rows]

    async def steps(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return [_plain(row) for row in await self._rows(_STEPS, _parameters(wanted, after, limit))]

    async def lessons(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        read, rows = self._database.content.read_text, await self._rows(_LESSONS, _parameters(wanted, after, limit))
        return [_plain(row) | {"text": read(row.text, "lessons.text", row.id)} for row in rows]

    @transaction
    async def _rows(self, connection: AsyncConnection, query: Any, parameters: dict[str, Any]) -> list[Any]:
        return list(await connection.execute(query, parameters))

    async def _exported(self, row: Any) -> ExportedTurn | None:
        """The turn to export; None if it was erased meanwhile."""
        context = await self._contexts.load_context(TurnId(row.id))
        if context is None or (context.turn.record.response is None and not context.turn.record.messages):
            return None
        judgement = None
        if row.judgement is not None:
            content = self._database.content
            answers = [
                content.read_text(raw, "votes.raw", answer_row(row.judgement, VOTES, place))
                for raw, place in zip(row.answers, row.places, strict=True)
            ]
            hint = content.read_text(row.hint, "judgements.hint", row.judgement)
            votes = list(zip(row.scores, answers, strict=True))
            judgement = ExportedJudgement(
                row.verdict, row.reward, TaughtHint.of(hint, row.hint_source, None), row.why, votes
            )
        return ExportedTurn(
            record=context.turn.record,
            session=SessionId(row.session),
            external=row.external_id,
            number=context.number,
            outcome=context.turn.outcome,
            next_state=await self._next_state(context),
            judgement=judgement,
        )

    async def _next_state(self, context: TurnContext) -> list[Message]:
        """The messages that follow a turn's reply in the first later request that holds it."""
        state = await find_next_state(self._contexts.load_context, context)
        return [] if state is None else state.messages


def _parameters(wanted: ExportFilter, after: UUID | None, limit: int) -> dict[str, Any]:
    return {
        "policy": None if wanted.policy is None else storable(wanted.policy),
        "session": wanted.session,
        "since": wanted.since,
        "until": wanted.until,
        "after": after,
        "limit": limit,
    }


def _plain(row: Any) -> Record:
    return {name: _json(value) for name, value in row._mapping.items()}


def _json(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    return value.isoformat() if isinstance(value, datetime) else value
