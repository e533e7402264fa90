"""Rewards that depend on other turns or on the session, in PostgreSQL: group, outcome.

Every function works in the caller's transaction, which must have locked the policy: no two finalize a group at once.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import JudgementId, SessionId, TurnId
from clawloop.judging.records import TurnDecision
from clawloop.samples.rewards import Member, decide_by_outcome, decide_group, wait_for_outcome
from db.exact_json import storable
from db.tables import JudgementRow, TurnRow
from db.training.samples import insert_sample, withdraw_sample

# Each turn with its newest decided judgement that was made under a recipe with this reward.
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
# Groups that were there when the session closed before are finalized already.
_OPEN_GROUPS = text("""
    SELECT DISTINCT t.group_id FROM turns t JOIN sessions ss ON ss.id = t.session_id
    WHERE t.session_id = :session AND t.group_id IS NOT NULL AND t.kind = 'main'
        AND (ss.closed_at IS NULL OR t.entered_at > ss.closed_at)
""")


async def finalize_group(
    connection: AsyncConnection, group: TurnId, *, closing: bool = False
) -> dict[TurnId, TurnDecision]:
    """Sample all members at once if none can still get a verdict; else their reasons name what they wait for."""
    rows = {TurnId(row.turn_id): row for row in await connection.execute(_IN_GROUP, {"group": group})}
    members = [_member(row) for row in rows.values()]
    decisions = decide_group(members, session_closed=closing or any(row.closed for row in rows.values()))
    for turn_id, decision in decisions.items():
        await _apply(connection, JudgementId(rows[turn_id].judgement), turn_id, decision)
    return decisions


async def finalize_groups_of(connection: AsyncConnection, session: SessionId) -> dict[TurnId, TurnDecision]:
    """Finalize all groups of a session that closes."""
    decisions: dict[TurnId, TurnDecision] = {}
    for group in (await connection.scalars(_OPEN_GROUPS, {"session": session})).all():
        decisions |= await finalize_group(connection, TurnId(group), closing=True)
    return decisions


async def finalize_by_outcome(connection: AsyncConnection, turn_id: TurnId) -> None:
    """Give a judged turn its reward if its session is closed; else its reason says that it waits for that."""
    for row in await connection.execute(_ALONE, {"turn": turn_id}):
        member = _member(row)
        if row.closed:
            decisions = decide_by_outcome([member], row.task_outcome)
        else:
            decisions = {} if row.reward is None else {turn_id: wait_for_outcome(member)}
        for decision in decisions.values():
            await _apply(connection, JudgementId(row.judgement), turn_id, decision)


async def finalize_outcome_of(
    connection: AsyncConnection, session: SessionId, *, closing: bool
) -> dict[TurnId, TurnDecision]:
    """Give judged turns of a session their rewards.

    Args:
        closing: True: the session is closing; reward the turns that came since it was last closed. False: its outcome
            was reported; reward the turns it was last closed with.
    """
    rows = [row for row in await connection.execute(_BY_OUTCOME, {"session": session}) if row.closed != closing]
    decisions = decide_by_outcome([_member(row) for row in rows], rows[0].task_outcome if rows else None)
    judgements = {row.turn_id: JudgementId(row.judgement) for row in rows}
    for turn_id, decision in decisions.items():
        await _apply(connection, judgements[turn_id], turn_id, decision)
    return decisions


def _member(row: Any) -> Member:
    mean_vote = None if row.mean_vote is None else float(row.mean_vote)
    return Member(TurnId(row.turn_id), row.reward, row.not_trainable, row.why or "", bool(row.taken), mean_vote)


async def _apply(connection: AsyncConnection, judgement: JudgementId, turn_id: TurnId, decision: TurnDecision) -> None:
    # The judgement's own reason stays: the group quotes it when it is finalized again.
    await connection.execute(update(JudgementRow).where(JudgementRow.id == judgement).values(outcome=decision.outcome))
    turn = update(TurnRow).where(TurnRow.id == turn_id, TurnRow.outcome != TurnOutcome.ERASED)
    await connection.execute(turn.values(outcome=decision.outcome, outcome_detail=storable(decision.why)))
    if decision.outcome is TurnOutcome.SAMPLED:
        await insert_sample(connection, judgement, turn_id, decision.reward, None, decision.why)
    else:
        await withdraw_sample(connection, judgement, decision.why)
