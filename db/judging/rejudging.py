"""Votes looked at again in PostgreSQL: turns judged again, another judge's verdicts, agreement with outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, and_, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.core.contracts.sessions import SessionFacts
from clawloop.core.contracts.training import UNTAKEN, SampleState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.episodes.curriculum import SUCCESS
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.judging.agreement import Pair, VotedTurn
from clawloop.core.judging.plan import RejudgeFacts
from clawloop.core.judging.records import VOTES
from clawloop.operations.history import HistoryKey, HistoryTurn, NewVerdict
from db.content import storable
from db.database import PostgresStore, transaction
from db.judging.tables import newest_judgement
from db.tables import ComparisonRow, FeedbackRow, JudgementRow, SampleRow, SessionRow, TurnRow
from db.training.policies import require_policy

# Judging again --------------------------------------------------------------------------------------------------------
# Turns that an operator may have judged again, in PostgreSQL.


class PostgresRejudgeStore(PostgresStore):
    """Satisfies `clawloop.operations.sessions.RejudgeStore`."""

    @transaction
    async def rejudge_facts(self, connection: AsyncConnection, turn_id: TurnId) -> RejudgeFacts | None:
        facts = await _read(connection, _query().where(TurnRow.id == turn_id))
        return facts[0] if facts else None

    @transaction
    async def of_session(self, connection: AsyncConnection, session: SessionId) -> list[RejudgeFacts]:
        """The session's main turns in their order."""
        main = _query().where(TurnRow.session_id == session, TurnRow.kind == TurnKind.MAIN).order_by(TurnRow.id)
        return await _read(connection, main)

    @transaction
    async def unjudged(self, connection: AsyncConnection, limit: int) -> list[RejudgeFacts]:
        """Turns without any valid vote, oldest first."""
        return await _read(
            connection, _query().where(TurnRow.outcome == TurnOutcome.UNJUDGED).order_by(TurnRow.id).limit(limit)
        )


def _query() -> Select[Any]:
    newest_decided = (
        select(func.max(JudgementRow.revision))
        .where(JudgementRow.turn_id == TurnRow.id, JudgementRow.decided_at.is_not(None))
        .scalar_subquery()
    )
    open_states = (*UNTAKEN, SampleState.EXPIRED)
    decisive_sample = (
        select(SampleRow.state)
        .join(JudgementRow, JudgementRow.id == SampleRow.judgement_id)
        .where(SampleRow.turn_id == TurnRow.id)
        .order_by(SampleRow.state.not_in(open_states).desc(), JudgementRow.revision.desc())
        .limit(1)
        .scalar_subquery()
    )
    after, further = aliased(TurnRow), aliased(TurnRow)
    # Side turns between do not count, nor do erased turns.
    leads_on = (
        select(further.id).where(further.parent_turn_id == after.id, further.outcome != TurnOutcome.ERASED).exists()
    )
    followed = select(after.id).where(
        after.parent_turn_id == TurnRow.id,
        after.outcome != TurnOutcome.ERASED,
        or_(after.kind == TurnKind.MAIN, leads_on),
    )
    rated = select(FeedbackRow.id).where(FeedbackRow.turn_id == TurnRow.id)
    return select(
        TurnRow.id,
        TurnRow.kind,
        TurnRow.outcome,
        TurnRow.version,
        TurnRow.response.is_not(None).label("replied"),
        (func.coalesce(newest_decided, -1) + 1).label("next_revision"),
        decisive_sample.label("sample"),
        or_(followed.exists(), rated.exists()).label("has_follow_up"),
        SessionRow.id.label("session"),
        SessionRow.policy,
        SessionRow.identified_by,
        SessionRow.created_at,
    ).join(SessionRow, and_(SessionRow.id == TurnRow.session_id, TurnRow.episode_id.is_(None)))


async def _read(connection: AsyncConnection, query: Select[Any]) -> list[RejudgeFacts]:
    return [
        RejudgeFacts(
            turn_id=TurnId(row.id),
            session=SessionFacts(SessionId(row.session), row.policy, row.identified_by, row.created_at, row.version),
            kind=TurnKind(row.kind),
            outcome=TurnOutcome(row.outcome),
            replied=row.replied,
            sample=None if row.sample is None else SampleState(row.sample),
            next_revision=row.next_revision,
            has_follow_up=row.has_follow_up,
        )
        for row in await connection.execute(query)
    ]


# Comparisons ----------------------------------------------------------------------------------------------------------
# Comparisons of stored turns' verdicts with those of another judge or recipe, in PostgreSQL.

_NEWEST = f"CROSS JOIN LATERAL {newest_judgement('t.id')} newest"
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


class PostgresHistoryStore(PostgresStore):
    """Satisfies `clawloop.operations.history.HistoryStore`."""

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
        await connection.execute(marked.values(applied_at=func.now()))


def _parameters(key: HistoryKey) -> dict[str, object]:
    return {"policy": key.policy, "signal_hash": key.signal_hash, "judge": key.judge}


# Precision ------------------------------------------------------------------------------------------------------------
# Votes on turns of episodes that have a reward, in PostgreSQL.

# The newest ones: a judge, or what it judges, may have changed since older ones.
_MOST_TURNS = 10_000
_VOTED = text("""
    WITH judged AS (
        SELECT j.id, e.reward >= :success AS succeeded
        FROM rollout_groups g JOIN episodes e ON e.group_id = g.id AND e.state = 'scored'
            JOIN turns t ON t.episode_id = e.id JOIN judgements j ON j.turn_id = t.id AND j.revision = 0
        WHERE g.policy = :policy ORDER BY t.id DESC LIMIT :most)
    SELECT judged.succeeded, array_agg(v.score ORDER BY v.index) AS votes
    FROM judged JOIN votes v ON v.judgement_id = judged.id AND v.kind = :kind
    GROUP BY judged.id, judged.succeeded
""")


class PostgresVoteReader(PostgresStore):
    @transaction
    async def voted_turns(self, connection: AsyncConnection, policy: str) -> list[VotedTurn]:
        await require_policy(connection, policy)
        parameters = {"policy": storable(policy), "success": SUCCESS, "kind": VOTES, "most": _MOST_TURNS}
        return [VotedTurn(row.votes, row.succeeded) for row in await connection.execute(_VOTED, parameters)]
