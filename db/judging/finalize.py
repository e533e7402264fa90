"""Finalizing a judgement: writes verdict, hint, sample and the turn's outcome.

Every function works in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.rows import namedtuple_row
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import UNTAKEN, SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable, StoreUnavailable
from clawloop.ids import FeedbackId, JudgementId, TurnId
from clawloop.judging.records import Ballot, FinalizedJudgement, Relation
from clawloop.samples.rewards import with_reward
from db.content import content_of
from db.database import raw_connection
from db.exact_json import storable
from db.judging.rewards import finalize_by_outcome, finalize_group, mean_before
from db.tables import FeedbackRow, JudgementRow, PolicyRow, SessionRow, TurnRow
from db.training.policies import lock_policy
from db.training.samples import SamplePlace, insert_sample, sample_place, supersede_others, withdraw_sample
from db.training.work_flag import refresh_work_flag

# All that finalizing depends on. One statement: each costs a judge worker more CPU than it costs PostgreSQL.
_FACTS = """
    SELECT j.id AS judgement, ss.policy, j.turn_id, j.shown_by, j.verdict, own.outcome, after.outcome AS after,
        own.session_id, own.group_id, r.content,
        (SELECT s.state FROM samples s WHERE s.judgement_id = j.id) AS sample,
        (SELECT array_agg(s.state) FROM samples s WHERE s.turn_id = j.turn_id AND s.judgement_id <> j.id)
            AS other_samples,
        votes.indices, votes.scores, given.applied, given.unapplied
    FROM unnest(%s::uuid[], %s::text[]) AS asked(judgement, kind)
        JOIN judgements j ON j.id = asked.judgement
        JOIN turns own ON own.id = j.turn_id JOIN sessions ss ON ss.id = own.session_id
        JOIN policies p ON p.id = ss.policy LEFT JOIN recipes r ON r.hash = p.recipe_hash
        LEFT JOIN turns after ON after.id = j.shown_by
        CROSS JOIN LATERAL (
            SELECT array_agg(v.index ORDER BY v.index) AS indices, array_agg(v.score ORDER BY v.index) AS scores
            FROM votes v WHERE v.judgement_id = j.id AND v.kind = asked.kind) votes
        CROSS JOIN LATERAL (
            SELECT array_agg(f.id) FILTER (WHERE f.applied_at IS NOT NULL) AS applied,
                array_agg(f.id) FILTER (WHERE f.applied_at IS NULL) AS unapplied
            FROM feedback f WHERE f.turn_id = j.turn_id) given
"""


@dataclass(frozen=True, slots=True)
class Locked:
    """A judgement as it is while policy and judgement are locked.

    Attributes:
        verdict: before this call.
        sample: the state of its sample; None: it has none.
        other_samples: states of the samples of the turn's other judgements.
        votes: the stored votes of the asked kind, by index.
    """

    turn_id: TurnId
    verdict: int | None
    place: SamplePlace
    sample: str | None
    other_samples: frozenset[str]
    votes: Mapping[int, int | None]
    applied: frozenset[FeedbackId]
    unapplied: frozenset[FeedbackId]


async def finalize_judgement(
    connection: AsyncConnection,
    judgement: JudgementId,
    finalized: FinalizedJudgement,
    feedback_ids: Sequence[FeedbackId],
) -> str | None:
    """See `activities.judging.ports.JudgementStore.finalize`."""
    ballot = finalized.ballot
    policy_row, locked = await _lock(connection, judgement, None if ballot is None else ballot.kind)
    turn_id, policy = locked.turn_id, policy_row.id
    new_feedback = locked.unapplied & set(feedback_ids)
    if is_settled(locked, ballot, feedback_ids):
        return None
    if locked.other_samples & {*UNTAKEN}:
        await supersede_others(connection, judgement, turn_id, finalized.why)
    own = finalized.reward
    mean = await mean_before(connection, policy_row, locked.verdict or 0, finalized.verdict.verdict or 0)
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
        reward, hinted = finalized.reward or None, finalized.hinted_prompt_ids
        await insert_sample(connection, judgement, turn_id, reward, hinted, finalized.why, locked.place)
    elif locked.sample is not None:
        await withdraw_sample(connection, judgement, finalized.why)
    if finalized.relation is Relation.GROUP:
        await finalize_group(connection, TurnId(locked.place.group_id or turn_id))
    if finalized.relation is Relation.OUTCOME:
        await finalize_by_outcome(connection, turn_id)
    if new_feedback:
        unapplied = update(FeedbackRow).where(FeedbackRow.id.in_(new_feedback), FeedbackRow.applied_at.is_(None))
        await connection.execute(unapplied.values(applied_at=func.now()))
    return policy if await refresh_work_flag(connection, policy) else None


def is_settled(locked: Locked, ballot: Ballot | None, feedback_ids: Sequence[FeedbackId]) -> bool:
    """True if the judgement may not change any more, because a step has or had a sample of the turn.

    Raises:
        StoreUnavailable: the judgement was made from less than is stored by now; judge again.
    """
    if locked.applied - set(feedback_ids):
        raise StoreUnavailable(f"other feedback on turn {locked.turn_id} was applied meanwhile")
    new_feedback = locked.unapplied & set(feedback_ids)
    if locked.sample is not None and locked.sample not in UNTAKEN:
        # A step has or had it, or it expired: it cannot change any more.
        if new_feedback:
            raise StoreUnavailable(f"a step took the sample of turn {locked.turn_id} meanwhile")
        return True
    # The judgement is locked, so that no vote is inserted meanwhile.
    if ballot is not None and [locked.votes.get(index) for index in range(len(ballot.scores))] != list(ballot.scores):
        raise StoreUnavailable(f"other votes on turn {locked.turn_id} were stored first")
    # Expired samples do not count: nothing was learned from them, so the turn may have another.
    return not new_feedback and bool(locked.other_samples - {*UNTAKEN, SampleState.EXPIRED})


async def _lock(connection: AsyncConnection, judgement: JudgementId, kind: str | None) -> tuple[PolicyRow, Locked]:
    """Lock the policy and the judgement, and read what finalizing it depends on.

    Args:
        kind: of the votes that are read.

    Raises:
        RecordUnusable: the turn, the one that holds its next state, or with that the judgement was erased.
    """
    of_turn = (
        select(SessionRow.policy)
        .join(TurnRow, TurnRow.session_id == SessionRow.id)
        .join(JudgementRow, JudgementRow.turn_id == TurnRow.id)
        .where(JudgementRow.id == judgement)
    )
    if (policy_id := await connection.scalar(of_turn)) is None:
        raise RecordUnusable(f"judgement {judgement} was erased")
    policy = await lock_policy(connection, policy_id)
    await connection.execute(select(JudgementRow.id).where(JudgementRow.id == judgement).with_for_update())
    facts = (await raw_connection(connection)).cursor(row_factory=namedtuple_row)
    # A statement of its own: it sees what was committed while this transaction waited for the locks.
    await facts.execute(*facts_of([judgement], [kind]))
    return policy, locked_of(judgement, await facts.fetchone())


def facts_of(judgements: Sequence[JudgementId], kinds: Sequence[str | None]) -> tuple[str, list[object]]:
    """The statement that reads the rows of `locked_of`, and its parameters.

    Args:
        kinds: of each judgement, of the votes that are read.
    """
    return _FACTS, [list(judgements), list(kinds)]


def locked_of(judgement: JudgementId, row: Any | None) -> Locked:
    """
    Raises:
        RecordUnusable: the turn, the one that holds its next state, or with that the judgement was erased.
    """
    if row is None:
        raise RecordUnusable(f"judgement {judgement} was erased")
    turn_id = TurnId(row.turn_id)
    require_content(turn_id, row.outcome)
    if row.shown_by is not None:
        require_content(TurnId(row.shown_by), row.after)
    return Locked(
        turn_id=turn_id,
        verdict=row.verdict,
        place=sample_place(row.policy, row),
        sample=row.sample,
        other_samples=frozenset(row.other_samples or ()),
        votes=dict(zip(row.indices or (), row.scores or (), strict=True)),
        applied=frozenset(map(FeedbackId, row.applied or ())),
        unapplied=frozenset(map(FeedbackId, row.unapplied or ())),
    )


def require_content(turn_id: TurnId, outcome: str) -> None:
    """
    Raises:
        RecordUnusable: the outcome says that the turn was erased.
    """
    if outcome == TurnOutcome.ERASED:
        raise RecordUnusable(f"turn {turn_id} was erased")
