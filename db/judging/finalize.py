"""Finalizes judgements: writes verdict, hint, sample and the turn's outcome, of any number in a handful of statements.

Ordinary is a first verdict by a judge whose reward depends on no other turn. A judgement that is not ordinary comes
alone, with the same statements and a few further ones. The statements go to psycopg directly, in pipelines: with
SQLAlchemy each takes several times the CPU, and each judged turn pays for it.

Locks, in this order: the policies by id, then the judgements by id, then their turns by id. Every function works in the
caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg.rows import namedtuple_row
from sqlalchemy import func, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.algorithms.rewards import RunningMean
from clawloop.core.contracts.training import UNTAKEN, SampleState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import ClawloopError, RecordUnusable, StoreUnavailable
from clawloop.core.ids import FeedbackId, JudgementId, TurnId, new_sample_id
from clawloop.core.judging.records import Ballot, FinalizedJudgement, Relation
from clawloop.core.samples.rewards import with_reward
from db.content import ContentCodec, changes_to_bytes, content_of, storable
from db.database import Raw, raw_connection
from db.group_commit import ALONE, Answer
from db.judging.rewards import finalize_by_outcome, finalize_group
from db.lessons.ledger import add_correction
from db.tables import FeedbackRow
from db.training.samples import (
    SamplePlace,
    insert_sample,
    is_place_held_out,
    sample_place,
    supersede_others,
    withdraw_sample,
)
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


# NO KEY UPDATE, as `lock_policy`: a new session refers to its policy.
_LOCK_POLICIES = """
    SELECT p.id, p.verdict_count, p.verdict_total FROM policies p
    WHERE p.id IN (
        SELECT s.policy FROM judgements j JOIN turns t ON t.id = j.turn_id JOIN sessions s ON s.id = t.session_id
        WHERE j.id = ANY(%b::uuid[]))
    ORDER BY p.id FOR NO KEY UPDATE
"""
_LOCK_JUDGEMENTS = "SELECT id FROM judgements WHERE id = ANY(%b::uuid[]) ORDER BY id FOR UPDATE"
_LOCK_TURNS = """
    SELECT id FROM turns WHERE id IN (SELECT turn_id FROM judgements WHERE id = ANY(%b::uuid[]))
    ORDER BY id FOR NO KEY UPDATE
"""
_WRITE_JUDGEMENTS = """
    UPDATE judgements j SET verdict = r.verdict, expected = r.expected, reward = r.reward, verdict_why = r.verdict_why,
        hint = r.hint, hint_why = r.hint_why, not_trainable = r.not_trainable, outcome = r.outcome, why = r.why,
        decided_at = now()
    FROM unnest(%s::uuid[], %s::int[], %s::float8[], %s::float8[], %s::text[], %s::text[], %s::text[], %s::text[],
            %s::text[], %s::text[])
        AS r(id, verdict, expected, reward, verdict_why, hint, hint_why, not_trainable, outcome, why)
    WHERE j.id = r.id
"""
_WRITE_TURNS = """
    UPDATE turns t SET outcome = r.outcome, outcome_detail = r.why
    FROM unnest(%b::uuid[], %b::text[], %b::text[]) AS r(id, outcome, why) WHERE t.id = r.id
"""
_WRITE_SAMPLES = """
    INSERT INTO samples (id, judgement_id, turn_id, policy, state, reason, reward, hinted_prompts)
    SELECT * FROM unnest(%s::uuid[], %s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::text[], %s::float8[],
        %s::bytea[])
"""
_WRITE_MEANS = """
    UPDATE policies p SET verdict_count = verdict_count + r.count, verdict_total = verdict_total + r.total
    FROM unnest(%b::text[], %b::int[], %b::float8[]) AS r(id, count, total) WHERE p.id = r.id
"""


@dataclass(frozen=True, slots=True)
class Finalizing:
    """The arguments of `activities.judging.judge_turn.JudgementStore.finalize`."""

    judgement: JudgementId
    finalized: FinalizedJudgement
    feedback_ids: Sequence[FeedbackId]

    @property
    def is_ordinary(self) -> bool:
        """True if the arguments allow the judgement to be finalized together with others."""
        return self.finalized.relation in (Relation.NONE, Relation.MEAN) and not self.feedback_ids


@dataclass(frozen=True, slots=True)
class Locked:
    """A judgement as it is while policy and judgement are locked.

    Attributes:
        shown_by: the turn that holds its next state; None without one.
        verdict: before this call.
        sample: the state of its sample; None: it has none.
        other_samples: states of the samples of the turn's other judgements.
        votes: the stored votes of the asked kind, by index.
    """

    turn_id: TurnId
    shown_by: TurnId | None
    verdict: int | None
    place: SamplePlace
    sample: str | None
    other_samples: frozenset[str]
    votes: Mapping[int, int | None]
    applied: frozenset[FeedbackId]
    unapplied: frozenset[FeedbackId]


@dataclass(slots=True)
class _Decided:
    """A judgement that is written.

    Attributes:
        finalized: with its reward against the mean verdict, where it is so measured.
        own: the reward by its own verdict alone.
    """

    call: Finalizing
    finalized: FinalizedJudgement
    own: float | None
    locked: Locked

    @property
    def judgement(self) -> JudgementId:
        return self.call.judgement

    @property
    def has_sample(self) -> bool:
        """True if its sample is made here: that of a related turn is made once the related turns are known."""
        return self.finalized.sampled and self.finalized.relation in (Relation.NONE, Relation.MEAN)

    @property
    def is_fresh(self) -> bool:
        """True if that sample is a new row that waits for a step."""
        return self.has_sample and self.locked.sample is None and not is_place_held_out(self.locked.place)


async def finalize(connection: AsyncConnection, calls: Sequence[Finalizing]) -> list[Answer[str | None]]:
    """Finalize judgements: the policy that has a new batch, or None; the error of one that cannot be finalized.

    ALONE, where there are several, for one that is not ordinary, of which nothing was written.

    Args:
        calls: of different judgements.
    """
    raw = await raw_connection(connection)
    policies, facts = await _lock(raw, calls)
    means = {policy: RunningMean(count, total) for policy, (count, total) in policies.items()}
    answers: list[Answer[str | None]] = []
    decided: list[_Decided] = []
    turns: set[TurnId] = set()
    for call in calls:
        try:
            locked = locked_of(call.judgement, facts.get(call.judgement))
            if is_settled(locked, call.finalized.ballot, call.feedback_ids):
                answers.append(None)
                continue
        except ClawloopError as error:
            answers.append(error)
            continue
        if len(calls) > 1 and (locked.turn_id in turns or not _is_ordinary(call, locked)):
            answers.append(ALONE)
            continue
        turns.add(locked.turn_id)
        finalized, means[locked.place.policy] = _measured(call.finalized, locked, means[locked.place.policy])
        decided.append(_Decided(call, finalized, call.finalized.reward, locked))
        answers.append(None)
    if not decided:
        return answers
    changes = [
        (policy, after.count - count, after.total - total)
        for policy, (count, total) in policies.items()
        if (after := means[policy]) != RunningMean(count, total)
    ]
    await _write(raw, decided, changes, content_of(connection))
    for one in decided:
        await _write_the_rest(connection, one)
    for policy in {one.locked.place.policy for one in decided}:
        if await refresh_work_flag(connection, policy):
            first = next(one for one in decided if one.locked.place.policy == policy)
            answers[calls.index(first.call)] = policy
    return answers


def _is_ordinary(call: Finalizing, locked: Locked) -> bool:
    return call.is_ordinary and locked.sample is None and not locked.other_samples


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


async def _lock(raw: Raw, calls: Sequence[Finalizing]) -> tuple[dict[str, tuple[int, float]], dict[JudgementId, Any]]:
    """The locked policies' verdicts, and what finalizing each judgement depends on."""
    judgements = [call.judgement for call in calls]
    kinds = [None if call.finalized.ballot is None else call.finalized.ballot.kind for call in calls]
    async with raw.pipeline():
        policies = await raw.execute(_LOCK_POLICIES, [judgements])
        await raw.execute(_LOCK_JUDGEMENTS, [judgements])
        await raw.execute(_LOCK_TURNS, [judgements])
        # A statement of its own: it sees what was committed while this transaction waited for the locks.
        facts = raw.cursor(row_factory=namedtuple_row)
        await facts.execute(_FACTS, [judgements, kinds])
    rows = await facts.fetchall()
    return {row[0]: (row[1], row[2]) for row in await policies.fetchall()}, {JudgementId(row[0]): row for row in rows}


def _measured(
    finalized: FinalizedJudgement, locked: Locked, mean: RunningMean
) -> tuple[FinalizedJudgement, RunningMean]:
    """The judgement with its reward against the mean verdict, where it is so measured, and the mean after it."""
    own, verdict = locked.verdict or 0, finalized.verdict.verdict or 0
    before = RunningMean(mean.count - abs(own), mean.total - own)
    reward = finalized.reward
    if finalized.relation is Relation.MEAN and verdict and reward is not None and before.count:
        finalized = with_reward(finalized, before.relative(reward), f"mean before {before.total / before.count:+.2f}")
    return finalized, RunningMean(before.count + abs(verdict), before.total + verdict)


async def _write(
    raw: Raw, decided: Sequence[_Decided], changes: Sequence[tuple[str, int, float]], content: ContentCodec
) -> None:
    """Write the judgements, their turns, the samples that wait for a step, and the policies' mean verdicts."""
    fresh = [_sample(one, content) for one in decided if one.is_fresh]
    async with raw.pipeline():
        await raw.execute(_WRITE_JUDGEMENTS, _columns([_judgement(one, content) for one in decided]))
        turns = [(one.locked.turn_id, one.finalized.outcome.value, storable(one.finalized.why)) for one in decided]
        await raw.execute(_WRITE_TURNS, _columns(turns))
        if fresh:
            await raw.execute(_WRITE_SAMPLES, _columns(fresh))
        if changes:
            await raw.execute(_WRITE_MEANS, _columns([(policy, n, float(total)) for policy, n, total in changes]))


async def _write_the_rest(connection: AsyncConnection, one: _Decided) -> None:
    """Writes the rarer parts of a judgement: a sample that is held out or was there, related turns, a lesson,
    feedback."""
    finalized, locked, judgement = one.finalized, one.locked, one.judgement
    if locked.other_samples & {*UNTAKEN}:
        await supersede_others(connection, judgement, locked.turn_id, finalized.why)
    if one.has_sample and not one.is_fresh:
        reward, hinted = finalized.reward or None, finalized.prompts_by_place
        await insert_sample(connection, judgement, locked.turn_id, reward, hinted, finalized.why, locked.place)
    elif locked.sample is not None and not one.has_sample:
        await withdraw_sample(connection, judgement, finalized.why)
    if finalized.relation is Relation.GROUP:
        await finalize_group(connection, TurnId(locked.place.group_id or locked.turn_id))
    if finalized.relation is Relation.OUTCOME:
        await finalize_by_outcome(connection, locked.turn_id)
    if (correction := finalized.correction) is not None:
        shown_by = None if correction.commented else locked.shown_by
        await add_correction(connection, locked.place.policy, correction, locked.turn_id, shown_by)
    if new_feedback := locked.unapplied & set(one.call.feedback_ids):
        unapplied = update(FeedbackRow).where(FeedbackRow.id.in_(new_feedback), FeedbackRow.applied_at.is_(None))
        await connection.execute(unapplied.values(applied_at=func.now()))


def _judgement(one: _Decided, content: ContentCodec) -> tuple[Any, ...]:
    finalized = one.finalized
    hint = None if finalized.hint.text is None else storable(finalized.hint.text)
    return (
        one.judgement,
        finalized.verdict.verdict,
        finalized.verdict.expected,
        one.own,
        finalized.verdict.why,
        content.write_text(hint, "judgements.hint", one.judgement),
        finalized.hint.why,
        finalized.not_trainable,
        finalized.outcome.value,
        finalized.why,
    )


def _sample(one: _Decided, content: ContentCodec) -> tuple[UUID | str | float | bytes | None, ...]:
    finalized, place = one.finalized, one.locked.place
    hinted = changes_to_bytes(finalized.prompts_by_place) if finalized.hinted_prompts else None
    return (
        new_sample_id(),
        one.judgement,
        one.locked.turn_id,
        place.policy,
        SampleState.FRESH.value,
        finalized.why,
        finalized.reward or None,
        content.write_bytes(hinted, "samples.hinted_prompts", one.judgement),
    )


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


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
        shown_by=None if row.shown_by is None else TurnId(row.shown_by),
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
