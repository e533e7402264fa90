"""Finalizing a judgement: writes verdict, hint, sample and the turn's outcome.

Every function works in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable, StoreUnavailable
from clawloop.ids import FeedbackId, JudgementId, TurnId
from clawloop.judging.records import FinalizedJudgement, Relation
from clawloop.samples.rewards import with_reward
from db.content import content_of
from db.exact_json import storable
from db.judging.rewards import finalize_by_outcome, finalize_group, mean_before
from db.judging.votes import votes_match
from db.tables import FeedbackRow, JudgementRow, TurnRow
from db.training.policies import lock_policy_of
from db.training.samples import insert_sample, is_taken, others_taken, supersede_others, withdraw_sample
from db.training.work_flag import refresh_work_flag


async def finalize_judgement(
    connection: AsyncConnection,
    judgement: JudgementId,
    finalized: FinalizedJudgement,
    feedback_ids: Sequence[FeedbackId],
) -> str | None:
    """See `activities.judging.ports.JudgementStore.finalize`."""
    turn_id, policy = await _lock_judgement(connection, judgement)
    new_feedback = await _unapplied(connection, turn_id, feedback_ids)
    if await is_taken(connection, judgement):
        if new_feedback:
            raise StoreUnavailable(f"a step took the sample of turn {turn_id} meanwhile")
        return None
    if finalized.ballot is not None and not await votes_match(connection, judgement, finalized.ballot):
        raise StoreUnavailable(f"other votes on turn {turn_id} were stored first")
    if not new_feedback and await others_taken(connection, judgement, turn_id):
        return None
    await supersede_others(connection, judgement, turn_id, finalized.why)
    own = finalized.reward
    mean = await mean_before(connection, policy, judgement, finalized.verdict.verdict or 0)
    if finalized.relation is Relation.MEAN and finalized.verdict.verdict and own is not None and mean.count:
        finalized = with_reward(finalized, mean.relative(own), f"mean before {mean.total / mean.count:+.2f}")
    hint = None if finalized.hint.text is None else storable(finalized.hint.text)
    decided = {
        "verdict": finalized.verdict.verdict,
        "expected": finalized.verdict.expected,
        "reward": own,
        "verdict_why": finalized.verdict.why,
        "hint": content_of(connection).write_text(hint, "judgements.hint", judgement),
        "hint_why": finalized.hint.why,
        "not_trainable": finalized.not_trainable,
        "outcome": finalized.outcome,
        "why": finalized.why,
        "decided_at": func.now(),
    }
    await connection.execute(update(JudgementRow).where(JudgementRow.id == judgement).values(decided))
    turn = update(TurnRow).where(TurnRow.id == turn_id)
    await connection.execute(turn.values(outcome=finalized.outcome, outcome_detail=storable(finalized.why)))
    if finalized.sampled and finalized.relation in (Relation.NONE, Relation.MEAN):
        await insert_sample(
            connection, judgement, turn_id, finalized.reward or None, finalized.hinted_prompt_ids, finalized.why
        )
    else:
        await withdraw_sample(connection, judgement, finalized.why)
    if finalized.relation is Relation.GROUP:
        group = (await connection.execute(select(TurnRow.group_id).where(TurnRow.id == turn_id))).scalar_one()
        await finalize_group(connection, TurnId(group or turn_id))
    if finalized.relation is Relation.OUTCOME:
        await finalize_by_outcome(connection, turn_id)
    if new_feedback:
        unapplied = update(FeedbackRow).where(FeedbackRow.id.in_(new_feedback), FeedbackRow.applied_at.is_(None))
        await connection.execute(unapplied.values(applied_at=func.now()))
    return policy if await refresh_work_flag(connection, policy) else None


async def _lock_judgement(connection: AsyncConnection, judgement: JudgementId) -> tuple[TurnId, str]:
    """Lock the policy and the judgement; return the judgement's turn and the policy.

    Raises:
        RecordUnusable: the turn, the one that holds its next state, or with that the judgement was erased.
    """
    query = select(JudgementRow.turn_id, JudgementRow.shown_by).where(JudgementRow.id == judgement)
    row = (await connection.execute(query)).first()
    policy = None if row is None else await lock_policy_of(connection, TurnId(row.turn_id))
    row = (await connection.execute(query.with_for_update())).first()
    if row is None or policy is None:
        raise RecordUnusable(f"judgement {judgement} was erased")
    for turn in await connection.execute(select(TurnRow.id, TurnRow.outcome).where(TurnRow.id.in_([*row]))):
        require_content(TurnId(turn.id), turn.outcome)
    return TurnId(row.turn_id), policy


async def _unapplied(
    connection: AsyncConnection, turn_id: TurnId, feedback_ids: Sequence[FeedbackId]
) -> list[FeedbackId]:
    """Those of `feedback_ids` that no judgement has applied.

    Raises:
        StoreUnavailable: feedback that is not in `feedback_ids` was applied.
    """
    query = select(FeedbackRow.id, FeedbackRow.applied_at.is_not(None).label("applied")).where(
        FeedbackRow.turn_id == turn_id
    )
    stored = (await connection.execute(query)).all()
    if any(row.applied and row.id not in feedback_ids for row in stored):
        raise StoreUnavailable(f"other feedback on turn {turn_id} was applied meanwhile")
    return [FeedbackId(row.id) for row in stored if not row.applied and row.id in feedback_ids]


def require_content(turn_id: TurnId, outcome: str) -> None:
    """
    Raises:
        RecordUnusable: the outcome says that the turn was erased.
    """
    if outcome == TurnOutcome.ERASED:
        raise RecordUnusable(f"turn {turn_id} was erased")
