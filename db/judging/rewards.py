"""Rewards that depend on more than a turn's verdict, in PostgreSQL: mean verdicts, groups, outcomes of sessions.

Every function works in the caller's transaction, which must hold the policy: so no two settle a group at once.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.algorithms.baseline import RunningMean
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import JudgementId, SessionId, TurnId
from clawloop.samples.rewards import Member, MemberResult, group_ends, outcome_ends, outcome_waits
from db.exact_json import storable
from db.tables import Judgement, Turn
from db.training.samples import insert_sample, withdraw_sample

_SEEN = text("""
    SELECT p.verdict_count, p.verdict_total, coalesce(j.verdict, 0) AS own
    FROM policies p, judgements j WHERE p.id = :policy AND j.id = :judgement
""")
_COUNT = text("""
    UPDATE policies SET verdict_count = verdict_count + :count, verdict_total = verdict_total + :total
    WHERE id = :policy
""")
# The newest decided judgement of each turn, if that was made under a recipe that rewards so.
_MEMBERS = """
    SELECT t.id AS turn_id, t.session_id, j.id AS judgement, j.reward, j.not_trainable, j.why, j.taken,
        (SELECT avg(v.score) FROM votes v WHERE v.judgement_id = j.id) AS mean_vote,
        coalesce(ss.closed_at >= t.entered_at, false) AS closed, ss.task_outcome
    FROM turns t JOIN sessions ss ON ss.id = t.session_id
    LEFT JOIN LATERAL (
        SELECT d.*, s.state IS NOT NULL AND s.state NOT IN ('fresh', 'superseded') AS taken
        FROM judgements d JOIN recipes r ON r.hash = d.recipe_hash LEFT JOIN samples s ON s.judgement_id = d.id
        WHERE d.turn_id = t.id AND d.decided_at IS NOT NULL AND r.content->'signal'->>'reward' = '{reward}'
        ORDER BY d.revision DESC, d.decided_at DESC LIMIT 1) j ON true
    WHERE {chosen} AND t.kind = 'main' AND t.outcome <> 'erased'
    ORDER BY t.id
"""
_IN_GROUP = text(_MEMBERS.format(reward="group", chosen="t.group_id = :group"))
_BY_OUTCOME = text(_MEMBERS.format(reward="outcome_process", chosen="t.session_id = :session AND j.id IS NOT NULL"))
_ALONE = text(_MEMBERS.format(reward="outcome_process", chosen="t.id = :turn AND j.id IS NOT NULL"))
# A group that was there when the session closed before is settled already.
_OPEN_GROUPS = text("""
    SELECT DISTINCT t.group_id FROM turns t JOIN sessions ss ON ss.id = t.session_id
    WHERE t.session_id = :session AND t.group_id IS NOT NULL AND t.kind = 'main'
        AND (ss.closed_at IS NULL OR t.entered_at > ss.closed_at)
""")


async def mean_before(connection: AsyncConnection, policy: str, judgement: JudgementId, verdict: int) -> RunningMean:
    """The policy's mean verdict without this judgement's own, which counts from now on with this verdict.

    Told twice of the same judgement it says the same, and counts it once.

    Args:
        verdict: 0 counts nowhere.
    """
    row = (await connection.execute(_SEEN, {"policy": policy, "judgement": judgement})).one()
    before = RunningMean(row.verdict_count - abs(row.own), row.verdict_total - row.own)
    change = {"count": abs(verdict) - abs(row.own), "total": verdict - row.own}
    if any(change.values()):
        await connection.execute(_COUNT, {"policy": policy, **change})
    return before


async def finalize_group(connection: AsyncConnection, group: TurnId, *, closing: bool = False) -> list[MemberResult]:
    """Samples for all members at once if none can still get a verdict; else they say what they wait for."""
    rows = {TurnId(row.turn_id): row for row in await connection.execute(_IN_GROUP, {"group": group})}
    members = [_member(row) for row in rows.values()]
    closed = closing or any(row.closed for row in rows.values())
    ends = group_ends(members, session_closed=closed)
    for end in ends:
        await _become(connection, JudgementId(rows[end.turn_id].judgement), end)
    return ends


async def finalize_groups_of(connection: AsyncConnection, session: SessionId) -> list[MemberResult]:
    """The same for all groups of a session that closes."""
    groups = (await connection.scalars(_OPEN_GROUPS, {"session": session})).all()
    return [end for group in groups for end in await finalize_group(connection, TurnId(group), closing=True)]


async def finalize_by_outcome(connection: AsyncConnection, turn_id: TurnId) -> None:
    """A turn that was judged: its reward if its session is closed; else it says that it waits for that."""
    for row in await connection.execute(_ALONE, {"turn": turn_id}):
        if row.closed:
            ends = outcome_ends([_member(row)], row.task_outcome)
        else:
            ends = [] if row.reward is None else [outcome_waits(_member(row))]
        for end in ends:
            await _become(connection, JudgementId(row.judgement), end)


async def finalize_outcome_of(connection: AsyncConnection, session: SessionId, *, closing: bool) -> list[MemberResult]:
    """Rewards for all judged turns of a session.

    Args:
        closing: it closes: for those that it was not closed with before. Else its outcome became known: for those.
    """
    rows = [row for row in await connection.execute(_BY_OUTCOME, {"session": session}) if row.closed != closing]
    ends = outcome_ends([_member(row) for row in rows], rows[0].task_outcome if rows else None)
    judgements = {row.turn_id: JudgementId(row.judgement) for row in rows}
    for end in ends:
        await _become(connection, judgements[end.turn_id], end)
    return ends


def _member(row: Any) -> Member:
    mean_vote = None if row.mean_vote is None else float(row.mean_vote)
    return Member(TurnId(row.turn_id), row.reward, row.not_trainable, row.why or "", bool(row.taken), mean_vote)


async def _become(connection: AsyncConnection, judgement: JudgementId, end: MemberResult) -> None:
    if end.outcome is TurnOutcome.SAMPLED:
        await insert_sample(connection, judgement, end.turn_id, end.reward, None, end.why)
    else:
        await withdraw_sample(connection, judgement, end.why)
    # The judgement keeps its own reason, which the group's next settling quotes.
    await connection.execute(update(Judgement).where(Judgement.id == judgement).values(outcome=end.outcome))
    alive = update(Turn).where(Turn.id == end.turn_id, Turn.outcome != TurnOutcome.ERASED)
    await connection.execute(alive.values(outcome=end.outcome, outcome_detail=storable(end.why)))
