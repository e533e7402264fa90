"""Closing a session in PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import and_, case, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import JudgementId, SessionId, TurnId
from clawloop.core.judging.records import ClosingSession, SessionTurn, TurnDecision
from clawloop.core.samples.decision import FallbackSample
from db.content import ContentCodec, content_of, storable
from db.database import PostgresStore, transaction
from db.judging.rewards import finalize_groups_of, finalize_outcome_of
from db.judging.tables import newest_judgement
from db.judging.votes import direct_from_text, read_direct
from db.tables import JudgementRow, SessionRow, TurnRow
from db.training.policies import lock_policy, lock_policy_of
from db.training.recipes import recipe_of_policy
from db.training.samples import insert_sample
from db.training.work_flag import refresh_work_flag

# `followed_by`: the nearest main turns below a turn; side turns between do not count.
_TURNS = text(f"""
    WITH RECURSIVE numbered AS (
        SELECT id, outcome, row_number() OVER (ORDER BY id) AS number, count(*) OVER () AS main_turns
        FROM turns WHERE session_id = :session AND kind = 'main'),
    wanted AS (SELECT * FROM numbered WHERE :all_turns OR outcome = 'waiting'),
    down AS (
        SELECT w.id AS turn_id, t.id, t.kind FROM wanted w JOIN turns t ON t.parent_turn_id = w.id
        WHERE w.outcome = 'waiting'
        UNION ALL
        SELECT d.turn_id, t.id, t.kind FROM down d JOIN turns t ON t.parent_turn_id = d.id WHERE d.kind = 'side')
    SELECT w.id, w.outcome, w.number, w.number = w.main_turns AS last, j.id AS judgement, j.verdict, j.expected,
        j.not_trainable,
        j.decided_at IS NOT NULL AS judged,
        (SELECT v.raw FROM votes v WHERE v.judgement_id = j.id AND v.kind = 'direct') AS direct,
        (SELECT count(*) FROM samples s WHERE s.turn_id = w.id AND s.state <> 'superseded') AS samples,
        ARRAY(SELECT d.id FROM down d WHERE d.turn_id = w.id AND d.kind = 'main' ORDER BY d.id) AS followed_by
    FROM wanted w
    LEFT JOIN LATERAL {newest_judgement("w.id")} j ON true
    ORDER BY w.id
""")
_came_since = (
    select(TurnRow.id)
    .where(TurnRow.session_id == SessionRow.id, TurnRow.kind == TurnKind.MAIN, TurnRow.outcome != TurnOutcome.ERASED)
    .where(TurnRow.entered_at > SessionRow.closed_at)
    .correlate(SessionRow)
    .exists()
)
_closed = and_(SessionRow.state == SessionState.CLOSED, ~_came_since)
_RELATED = text("""
    SELECT EXISTS (
        SELECT FROM turns t JOIN judgements j ON j.turn_id = t.id JOIN recipes r ON r.hash = j.recipe_hash
        WHERE t.session_id = :session AND r.content->'signal'->>'reward' <> 'verdict')
""")


class PostgresClosingStore(PostgresStore):
    """Satisfies `activities.judging.closing.ClosingStore`."""

    @transaction
    async def load(self, connection: AsyncConnection, session: SessionId) -> ClosingSession | None:
        query = select(SessionRow.policy, SessionRow.first_closed_at, SessionRow.task_outcome, _closed.label("closed"))
        row = (await connection.execute(query.where(SessionRow.id == session))).first()
        if row is None:
            return None
        is_first = row.first_closed_at is None
        try:
            signal = (await recipe_of_policy(connection, row.policy)).signal
        except RecordUnusable:
            signal = None
        count = select(func.count()).where(TurnRow.session_id == session, TurnRow.kind == TurnKind.MAIN)
        return ClosingSession(
            session,
            [
                _session_turn(turn, content_of(connection))
                for turn in await connection.execute(_TURNS, {"session": session, "all_turns": is_first})
            ],
            is_first,
            signal is not None and signal.at_least_one,
            main_turns=await connection.scalar(count) or 0,
            has_related_rewards=bool(await connection.scalar(_RELATED, {"session": session})),
            learns_by_outcome=row.task_outcome is not None
            and signal is not None
            and signal.reward == "outcome_process",
            closed=row.closed,
        )

    @transaction
    async def finalize_related(
        self, connection: AsyncConnection, session: SessionId
    ) -> tuple[dict[TurnId, TurnDecision], str | None]:
        policy: str = (await connection.execute(select(SessionRow.policy).where(SessionRow.id == session))).scalar_one()
        await lock_policy(connection, policy)
        decisions = await finalize_groups_of(connection, session)
        decisions |= await finalize_outcome_of(connection, session, closing=True)
        return decisions, policy if await refresh_work_flag(connection, policy) else None

    @transaction
    async def close(
        self,
        connection: AsyncConnection,
        session: SessionId,
        why: str,
        decisions: Mapping[TurnId, TurnDecision],
        fallback: FallbackSample | None = None,
    ) -> str | None:
        policy = None
        if fallback is not None and fallback.turn_id is not None:
            policy = await lock_policy_of(connection, fallback.turn_id)
        # The session is locked before its turns, in the order of inserts and erasures.
        await connection.execute(select(SessionRow.id).where(SessionRow.id == session).with_for_update())
        if fallback is not None and fallback.turn_id is not None:
            await _insert_fallback_sample(connection, fallback.turn_id, fallback.reward, fallback.why)
        for turn_id, decision in decisions.items():
            waiting = update(TurnRow).where(TurnRow.id == turn_id, TurnRow.outcome == TurnOutcome.WAITING)
            await connection.execute(waiting.values(outcome=decision.outcome, outcome_detail=storable(decision.why)))
        # A turn that was inserted meanwhile is not known to the workflow that closes: its session stays open.
        unknown = select(TurnRow.id).where(
            TurnRow.session_id == session, TurnRow.kind == TurnKind.MAIN, TurnRow.outcome == TurnOutcome.WAITING
        )
        values = {
            "state": case((unknown.exists(), SessionRow.state), else_=SessionState.CLOSED),
            "first_closed_at": func.coalesce(SessionRow.first_closed_at, func.now()),
            # Closing a closed session again, e.g. after feedback, changes neither time nor reason.
            "closed_at": case((_closed, SessionRow.closed_at), else_=func.now()),
            "closed_why": case((_closed, SessionRow.closed_why), else_=storable(why)),
            "guarantee": func.coalesce(SessionRow.guarantee, None if fallback is None else fallback.why),
        }
        await connection.execute(update(SessionRow).where(SessionRow.id == session).values(values))
        return policy if policy is not None and await refresh_work_flag(connection, policy) else None


def _session_turn(row: Any, content: ContentCodec) -> SessionTurn:
    return SessionTurn(
        turn_id=TurnId(row.id),
        number=row.number,
        outcome=TurnOutcome(row.outcome),
        judged=row.judged,
        followed_by=[TurnId(later) for later in row.followed_by],
        last=row.last,
        expected=row.expected,
        verdict=row.verdict,
        trainable=row.not_trainable is None if row.judged else None,
        samples=row.samples,
        direct=None if row.direct is None else direct_from_text(read_direct(content, row.direct, row.judgement)),
    )


async def _insert_fallback_sample(connection: AsyncConnection, turn_id: TurnId, reward: float | None, why: str) -> None:
    outcome = select(TurnRow.outcome).where(TurnRow.id == turn_id).with_for_update()
    if (await connection.execute(outcome)).scalar_one() == TurnOutcome.ERASED:
        return
    newest = (
        select(JudgementRow.id)
        .where(JudgementRow.turn_id == turn_id, JudgementRow.decided_at.is_not(None))
        .order_by(JudgementRow.revision.desc(), JudgementRow.decided_at.desc())
        .limit(1)
    )
    judgement = JudgementId((await connection.execute(newest)).scalar_one())
    decided = {"outcome": TurnOutcome.SAMPLED, "why": why}
    await connection.execute(update(JudgementRow).where(JudgementRow.id == judgement).values(decided))
    await connection.execute(
        update(TurnRow).where(TurnRow.id == turn_id).values(outcome=TurnOutcome.SAMPLED, outcome_detail=why)
    )
    await insert_sample(connection, judgement, turn_id, reward, {}, why)
