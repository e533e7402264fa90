"""Finalizes judgements of ordinary turns together: any number in a handful of statements.

Ordinary is a first verdict by a judge whose reward depends on no other turn. What is not is finalized alone
(`db/judging/finalize.py`), with the same result. The statements go to psycopg directly, in pipelines: with SQLAlchemy
each takes several times the CPU, and each judged turn pays for it.

Locks, in this order: the policies by id, then the judgements by id, then their turns by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg.rows import namedtuple_row
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.algorithms.rewards import RunningMean
from clawloop.contracts.training import SampleState
from clawloop.errors import ClawloopError
from clawloop.ids import FeedbackId, JudgementId, TurnId, new_sample_id
from clawloop.judging.records import FinalizedJudgement, Relation
from clawloop.samples.rewards import with_reward
from db.arrays import ids_to_bytes
from db.content import ContentCodec, content_of
from db.database import Raw, raw_connection
from db.exact_json import storable
from db.group_commit import ALONE, Answer
from db.judging.finalize import Locked, facts_of, is_settled, locked_of
from db.training.samples import insert_sample, is_place_held_out
from db.training.work_flag import refresh_work_flag

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
    INSERT INTO samples (id, judgement_id, turn_id, policy, state, reason, reward, hinted_prompt_ids)
    SELECT * FROM unnest(%s::uuid[], %s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::text[], %s::float8[],
        %s::bytea[])
"""
_WRITE_MEANS = """
    UPDATE policies p SET verdict_count = verdict_count + r.count, verdict_total = verdict_total + r.total
    FROM unnest(%b::text[], %b::int[], %b::float8[]) AS r(id, count, total) WHERE p.id = r.id
"""


@dataclass(frozen=True, slots=True)
class Finalizing:
    """The arguments of `activities.judging.ports.JudgementStore.finalize`."""

    judgement: JudgementId
    finalized: FinalizedJudgement
    feedback_ids: Sequence[FeedbackId]

    @property
    def is_ordinary(self) -> bool:
        """True if the arguments allow the judgement to be finalized together with others."""
        return self.finalized.relation in (Relation.NONE, Relation.MEAN) and not self.feedback_ids


@dataclass(slots=True)
class _Decided:
    """A judgement that is written here.

    Args:
        own: the reward by its own verdict alone.
    """

    judgement: JudgementId
    finalized: FinalizedJudgement
    own: float | None
    locked: Locked


async def finalize_together(connection: AsyncConnection, calls: Sequence[Finalizing]) -> list[Answer[str | None]]:
    """Finalize judgements; ALONE for one that is not ordinary, of which nothing was written.

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
        if locked.turn_id in turns or locked.sample is not None or locked.other_samples:
            answers.append(ALONE)
            continue
        turns.add(locked.turn_id)
        finalized, means[locked.place.policy] = _measured(call.finalized, locked, means[locked.place.policy])
        decided.append(_Decided(call.judgement, finalized, call.finalized.reward, locked))
        answers.append(None)
    if not decided:
        return answers
    changes = [
        (policy, after.count - count, after.total - total)
        for policy, (count, total) in policies.items()
        if (after := means[policy]) != RunningMean(count, total)
    ]
    await _write(connection, decided, changes)
    for policy in {one.locked.place.policy for one in decided}:
        if await refresh_work_flag(connection, policy):
            one = next(one for one in decided if one.locked.place.policy == policy)
            answers[[call.judgement for call in calls].index(one.judgement)] = policy
    return answers


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
        await facts.execute(*facts_of(judgements, kinds))
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
    connection: AsyncConnection, decided: Sequence[_Decided], changes: Sequence[tuple[str, int, float]]
) -> None:
    raw, content = await raw_connection(connection), content_of(connection)
    sampled = [one for one in decided if one.finalized.sampled]
    fresh = [_sample(one, content) for one in sampled if not is_place_held_out(one.locked.place)]
    async with raw.pipeline():
        await raw.execute(_WRITE_JUDGEMENTS, _columns([_judgement(one, content) for one in decided]))
        turns = [(one.locked.turn_id, one.finalized.outcome.value, storable(one.finalized.why)) for one in decided]
        await raw.execute(_WRITE_TURNS, _columns(turns))
        if fresh:
            await raw.execute(_WRITE_SAMPLES, _columns(fresh))
        if changes:
            await raw.execute(_WRITE_MEANS, _columns([(policy, n, float(total)) for policy, n, total in changes]))
    for one in sampled:
        if is_place_held_out(one.locked.place):
            reward, hinted = one.finalized.reward or None, one.finalized.hinted_prompt_ids
            turn_id, why = one.locked.turn_id, one.finalized.why
            await insert_sample(connection, one.judgement, turn_id, reward, hinted, why, one.locked.place)


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
    ids = finalized.hinted_prompt_ids
    hinted = None if ids is None else ids_to_bytes(ids)
    return (
        new_sample_id(),
        one.judgement,
        one.locked.turn_id,
        place.policy,
        SampleState.FRESH.value,
        finalized.why,
        finalized.reward or None,
        content.write_bytes(hinted, "samples.hinted_prompt_ids", one.judgement),
    )


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]
