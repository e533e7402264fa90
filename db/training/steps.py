"""Steps in PostgreSQL: claimed, committed, rejected, abandoned, expired or quarantined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from pydantic import JsonValue
from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from clawloop.core.contracts.training import (
    OPEN_STEPS,
    Attempts,
    BatchSample,
    Claim,
    Distance,
    GateCheck,
    HintUse,
    Pace,
    SampleState,
    StepBatch,
    StepRecord,
    StepState,
    TrainedStep,
    TrainingView,
    VersionRef,
    waiting_words,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import RecipeRejected, RecordUnusable
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Recipe
from db.content import advantages_to_bytes, content_of, exact_json, step_sample_row, storable
from db.database import Database, PostgresStore, transaction
from db.lessons.yardstick import keep_scores_of_replies, read_replies
from db.tables import PolicyRow, SampleRow, StepRow, StepSampleRow, VersionRow
from db.training.claims import Chosen, choose_groups, choose_samples, closed_by_canary, read_closed
from db.training.gate_checks import insert_checks, keep_scores, read_held_out, read_scores
from db.training.policies import (
    insert_event,
    lock_policy,
    next_step,
    version_ref,
    version_refs,
    versions_of_other_shape,
)
from db.training.recipes import recipe_by_hash, recipe_of_policy
from db.training.samples import end_samples, free_samples, needs_version, read_samples
from db.training.status import described, read_status, unusable_recipe
from db.training.work_flag import refresh_work_flag, set_work_flag
from db.turns.read import ConversationCache

# Transitions ----------------------------------------------------------------------------------------------------------
# Moves a step on: candidate, committed, rejected, abandoned, expired or quarantined, with its samples and their turns.
#
# Every function works in the caller's transaction, which must hold the policy's lock.

# Not of a turn that was erased while the step was computed.
_OF_TOKENS = text("""
    UPDATE step_samples m SET advantages = :advantages, moves = :moves FROM samples s JOIN turns t ON t.id = s.turn_id
    WHERE m.policy = :policy AND m.step = :step AND m.sample_id = :sample AND s.id = m.sample_id
        AND t.outcome <> 'erased'
""")


async def lock_step(connection: AsyncConnection, policy: str, n: int) -> StepRow:
    """The step's row, locked until the end of the transaction.

    Raises:
        RecordUnusable: there is no such step.
    """
    query = select(StepRow.__table__).where(StepRow.policy == policy, StepRow.n == n).with_for_update()
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise RecordUnusable(f"policy {policy!r} has no step {n}")
    return StepRow(**row)


async def samples_of(connection: AsyncConnection, step: StepRow) -> dict[SampleId, str | None]:
    """The step's samples in their order, each with the reason if it was dropped."""
    query = select(StepSampleRow.sample_id, StepSampleRow.dropped).where(
        StepSampleRow.policy == step.policy, StepSampleRow.step == step.n
    )
    rows = await connection.execute(query.order_by(StepSampleRow.place))
    return {SampleId(row.sample_id): row.dropped for row in rows}


async def mark_dropped(connection: AsyncConnection, step: StepRow, dropped: Mapping[SampleId, str]) -> None:
    await _mark(connection, step, dropped, StepSampleRow.dropped)


async def _mark(
    connection: AsyncConnection,
    step: StepRow,
    reasons: Mapping[SampleId, str],
    column: InstrumentedAttribute[str | None],
) -> None:
    for sample, why in reasons.items():
        row = update(StepSampleRow).where(
            StepSampleRow.policy == step.policy, StepSampleRow.step == step.n, StepSampleRow.sample_id == sample
        )
        await connection.execute(row.values({column: storable(why)}))


async def propose_step(
    connection: AsyncConnection, step: StepRow, trained: TrainedStep, checks: Sequence[GateCheck]
) -> None:
    """Insert the trained version as a candidate, with what the checks found about it so far."""
    version = trained.version
    values = {
        "policy": step.policy,
        "n": step.n,
        "parent": step.parent,
        "path": version.path,
        "sha256": bytes.fromhex(version.sha256),
    }
    await connection.execute(insert(VersionRow).values(values))
    await mark_dropped(connection, step, trained.figures.dropped)
    await _mark(connection, step, trained.figures.without_hint, StepSampleRow.without_hint)
    await _store_of_tokens(connection, step, trained)
    await _store_taught(connection, step, trained.figures.taught)
    await insert_checks(connection, step.policy, step.n, checks)
    await keep_scores(connection, version, trained.held_out)
    await keep_scores_of_replies(connection, version, trained.yardstick)
    candidate = {"state": StepState.CANDIDATE, "metrics": exact_json(metrics_of(trained))}
    row = update(StepRow).where(StepRow.policy == step.policy, StepRow.n == step.n)
    await connection.execute(row.values(candidate))


async def _store_of_tokens(connection: AsyncConnection, step: StepRow, trained: TrainedStep) -> None:
    advantages, moves, content = trained.figures.advantages, trained.figures.moves, content_of(connection)
    rows: list[dict[str, Any]] = []
    for sample in trained.figures.samples:
        if sample not in advantages and sample not in moves:
            continue
        row: dict[str, Any] = {"policy": step.policy, "step": step.n, "sample": sample}
        for column, figures in (("advantages", advantages), ("moves", moves)):
            stored = advantages_to_bytes(figures[sample]) if sample in figures else None
            place = step_sample_row(step.policy, step.n, sample)
            row[column] = content.write_bytes(stored, f"step_samples.{column}", place)
        rows.append(row)
    if rows:
        await connection.execute(_OF_TOKENS, rows)


async def _store_taught(
    connection: AsyncConnection, step: StepRow, taught: Mapping[SampleId, Sequence[HintUse]]
) -> None:
    for sample, hints in taught.items():
        row = update(StepSampleRow).where(
            StepSampleRow.policy == step.policy, StepSampleRow.step == step.n, StepSampleRow.sample_id == sample
        )
        await connection.execute(row.values(taught=exact_json([asdict(hint) for hint in hints])))


async def accept_step(connection: AsyncConnection, step: StepRow, canary_share: float = 0.0) -> None:
    """Make the step's version the policy's head, and its samples trained.

    Args:
        canary_share: the share of the conversations that get it until verdicts decide; 0: all of them.
    """
    await end_as_trained(connection, step)
    accepted: dict[str, Any] = {"head": step.n}
    if canary_share:
        accepted |= {"canary": step.n, "canary_share": canary_share, "canary_since": func.now()}
    else:  # a canary may still be found worse
        accepted["rejections"] = 0
    await connection.execute(update(PolicyRow).where(PolicyRow.id == step.policy).values(accepted))
    await insert_event(connection, step.policy, "version_accepted", version=step.n, parent=step.parent)
    await refresh_work_flag(connection, step.policy)


async def end_as_trained(connection: AsyncConnection, step: StepRow) -> None:
    """Commit the step: samples it left out expire, the others are trained."""
    query = select(StepSampleRow.sample_id, StepSampleRow.dropped, StepSampleRow.without_hint).where(
        StepSampleRow.policy == step.policy, StepSampleRow.step == step.n
    )
    rows = (await connection.execute(query.order_by(StepSampleRow.place))).all()
    learned = {SampleId(row.sample_id): trained_detail(step.n, row.without_hint) for row in rows if row.dropped is None}
    left_out = {
        SampleId(row.sample_id): f"left out of step {step.n}: {row.dropped}" for row in rows if row.dropped is not None
    }
    await end_samples(connection, learned, SampleState.TRAINED, TurnOutcome.TRAINED)
    await end_samples(connection, left_out, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await _end(connection, step, StepState.COMMITTED, None)


async def reject_step(connection: AsyncConnection, step: StepRow, reason: str, pause_after: int) -> None:
    """Set the samples of a rejected version aside; training goes on from its parent, or pauses after several."""
    await _set_aside(connection, step, StepState.REJECTED, f"rejected: {reason}", pause_after)
    await insert_event(connection, step.policy, "version_rejected", version=step.n, parent=step.parent, reason=reason)


async def set_aside_step(connection: AsyncConnection, step: StepRow, reason: str, pause_after: int) -> None:
    """Set the samples of a step that made no version aside; training goes on, or pauses after several."""
    await _set_aside(connection, step, StepState.QUARANTINED, reason, pause_after)
    await insert_event(connection, step.policy, "quarantined", step=step.n, reason=reason)


async def abandon_step(connection: AsyncConnection, step: StepRow, reason: str) -> None:
    """Make the step's samples fresh again; they expire if the recipe's [signal] table has changed."""
    await _end(connection, step, StepState.ABANDONED, reason)
    samples = await samples_of(connection, step)
    await free_samples(connection, step.policy, list(samples))
    await insert_event(connection, step.policy, "step_abandoned", step=step.n, reason=reason)
    await refresh_work_flag(connection, step.policy)


async def abandon_step_and_pause(connection: AsyncConnection, step: StepRow, reason: str) -> None:
    """Make the step's samples fresh again, and pause the policy."""
    await _pause(connection, step.policy, f"step {step.n}: {reason}")
    await abandon_step(connection, step, reason)


async def expire_step(connection: AsyncConnection, step: StepRow, reason: str) -> None:
    """Expire the step's samples, as nothing can be learned from them."""
    why = f"step {step.n}: {reason}"
    await _end(connection, step, StepState.ABANDONED, reason)
    samples = await samples_of(connection, step)
    await end_samples(connection, dict.fromkeys(samples, why), SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await insert_event(connection, step.policy, "step_expired", step=step.n, reason=reason, samples=len(samples))
    await refresh_work_flag(connection, step.policy)


async def quarantine_step(connection: AsyncConnection, step: StepRow, reason: str) -> None:
    """Quarantine the step's samples, and pause the policy."""
    samples = await _quarantine_samples(connection, step, StepState.QUARANTINED, reason)
    await _pause(connection, step.policy, f"step {step.n}: {reason}")
    await insert_event(connection, step.policy, "quarantined", step=step.n, reason=reason, samples=len(samples))
    await refresh_work_flag(connection, step.policy)


def moved_on(policy: PolicyRow, step: StepRow) -> str:
    """The reason for abandoning a step whose parent or epoch is no longer the policy's."""
    moved = f"the policy moved on to version {policy.head} in epoch {policy.epoch}"
    return f"{moved}; the step began from {step.parent} in epoch {step.epoch}"


def with_hints_lost(step: StepBatch, trained: TrainedStep) -> TrainedStep:
    """The trained step, its figures including hints that were unusable before the trainer got the batch."""
    lost = {**step.without_hint, **trained.figures.without_hint}
    of_trained = {sample: why for sample, why in lost.items() if sample not in trained.figures.dropped}
    return replace(trained, figures=replace(trained.figures, without_hint=of_trained))


def trained_detail(n: int, without_hint: str | None) -> str:
    """The outcome detail of a trained sample's turn.

    Args:
        without_hint: why only its verdict was trained; None if the whole sample was.
    """
    return f"trained in step {n}" if without_hint is None else f"trained in step {n} without its hint: {without_hint}"


def metrics_of(trained: TrainedStep) -> dict[str, JsonValue]:
    """The figures as stored with the step, with numbers of dropped samples in place of the samples."""
    figures = trained.figures
    asked_for: dict[str, JsonValue] = {} if figures.moves_seconds is None else {"moves_seconds": figures.moves_seconds}
    return asked_for | {
        "loss": figures.loss,
        "parts": dict(figures.parts),
        "grad_norm": figures.grad_norm,
        "ratio": figures.ratio,
        "kl": figures.kl,
        "tokens": figures.tokens,
        "samples": len(figures.samples),
        "dropped": len(figures.dropped),
        "without_hint": len(figures.without_hint),
        "seconds": trained.seconds,
        "to_parent": _distance(figures.to_parent),
        "to_base": _distance(figures.to_base),
    }


def _distance(distance: Distance | None) -> dict[str, JsonValue] | None:
    return None if distance is None else asdict(distance)


async def _set_aside(
    connection: AsyncConnection, step: StepRow, state: StepState, reason: str, pause_after: int
) -> None:
    await _quarantine_samples(connection, step, state, reason)
    await count_rejection(connection, step.policy, step.n, reason, pause_after)


async def count_rejection(connection: AsyncConnection, policy: str, n: int, reason: str, pause_after: int) -> None:
    """Count a step without an accepted version; training pauses after several in a row."""
    counted = update(PolicyRow).where(PolicyRow.id == policy).values(rejections=PolicyRow.rejections + 1)
    rejections = (await connection.execute(counted.returning(PolicyRow.rejections))).scalar_one()
    if rejections >= pause_after:
        await _pause(connection, policy, paused_by_rejections(rejections, n, reason))
    await refresh_work_flag(connection, policy)


def paused_by_rejections(rejections: int, n: int, reason: str) -> str:
    """The reason that training pauses after steps without an accepted version."""
    steps = "1 step" if rejections == 1 else f"{rejections} steps in a row"
    return f"{steps} without an accepted version, the last one step {n}: {reason}; see `clawloop policy versions`"


async def _quarantine_samples(
    connection: AsyncConnection, step: StepRow, state: StepState, reason: str
) -> dict[SampleId, str | None]:
    await _end(connection, step, state, reason)
    samples = await samples_of(connection, step)
    why = dict.fromkeys(samples, f"step {step.n}: {reason}")
    await end_samples(connection, why, SampleState.QUARANTINED, TurnOutcome.QUARANTINED)
    return samples


async def _pause(connection: AsyncConnection, policy: str, why: str) -> None:
    paused = {"paused_reason": storable(why), "paused_at": func.coalesce(PolicyRow.paused_at, func.now())}
    await connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(paused))


async def _end(connection: AsyncConnection, step: StepRow, state: StepState, reason: str | None) -> None:
    values = {"state": state, "reason": None if reason is None else storable(reason), "finished_at": func.now()}
    row = update(StepRow).where(StepRow.policy == step.policy, StepRow.n == step.n)
    await connection.execute(row.values(values))


# Steps ----------------------------------------------------------------------------------------------------------------
# Claims, commits and ends steps: a batch is claimed once, and one step at a time makes a version.
#
# Every change locks the policy's row, so that concurrent changes run one after the other.

_NO_PACE: Final = {"tokens_a_second": None, "seconds_left": None}


class PostgresStepStore(PostgresStore):
    """Implements `activities.training.steps.StepStore`.

    Args:
        conversations: a cache to share with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        super().__init__(database)
        self._conversations = conversations or ConversationCache()

    @transaction
    async def status(self, connection: AsyncConnection, policy: str) -> TrainingView:
        return await read_status(connection, policy)

    @transaction
    async def claim(self, connection: AsyncConnection, policy: str, n: int) -> Claim:
        locked = await lock_policy(connection, policy)
        query = select(StepRow).where(StepRow.policy == policy, StepRow.n == n)
        if (step := (await connection.execute(query)).one_or_none()) is not None:
            samples = await samples_of(connection, await lock_step(connection, policy, n))
            reason = step.reason or f"{len(samples)} samples"
            return Claim(policy, n, StepState(step.state), len(samples), reason)
        opened = select(StepRow.n, StepRow.state).where(StepRow.policy == policy, StepRow.state.in_(OPEN_STEPS))
        if (other := (await connection.execute(opened)).one_or_none()) is not None:
            return Claim(policy, n, None, reason=f"step {other.n} is {described(StepState(other.state))}")
        if n != (expected := await next_step(connection, policy)):
            return Claim(policy, n, None, reason=f"the next step is {expected}")
        return await _claim_new(connection, locked, n)

    @transaction
    async def begin_attempt(self, connection: AsyncConnection, policy: str, n: int) -> Attempts:
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CLAIMED:
            raise RecordUnusable(_not_claimed(step))
        begun = step.attempt + 1
        await _update(connection, step, attempt=begun, attempt_at=func.now(), progress=None, **_NO_PACE)
        return Attempts(begun, step.failed, step.interrupted)

    @transaction
    async def note_progress(
        self, connection: AsyncConnection, policy: str, n: int, attempt: int, progress: str, pace: Pace | None = None
    ) -> None:
        claimed = (StepRow.policy == policy, StepRow.n == n, StepRow.state == StepState.CLAIMED)
        # Temporal may have given this attempt up, and begun another.
        newest = update(StepRow).where(*claimed, StepRow.attempt == attempt)
        known = _NO_PACE if pace is None else asdict(pace)
        await connection.execute(newest.values(progress=storable(progress), **known))

    @transaction
    async def is_claimed(self, connection: AsyncConnection, policy: str, n: int) -> bool:
        state = await connection.scalar(select(StepRow.state).where(StepRow.policy == policy, StepRow.n == n))
        return state == StepState.CLAIMED

    @transaction
    async def end_attempt(
        self, connection: AsyncConnection, policy: str, n: int, attempt: int, *, failed: bool, why: str | None = None
    ) -> Attempts:
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CLAIMED:
            return Attempts(step.attempt, step.failed, step.interrupted)
        ended = Attempts(step.attempt, step.failed + failed, step.interrupted + (not failed))
        values: dict[str, object] = {"failed": ended.failed, "interrupted": ended.interrupted}
        if attempt == step.attempt:  # else Temporal gave it up, and the status is that of a later one
            values |= {"attempt_at": None, "progress": storable(waiting_words(why)), **_NO_PACE}
        await _update(connection, step, **values)
        return ended

    @transaction
    async def batch(self, connection: AsyncConnection, policy: str, n: int) -> StepBatch:
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CLAIMED:
            raise RecordUnusable(_not_claimed(step))
        recipe = await recipe_by_hash(connection, step.recipe_hash)
        members = await samples_of(connection, step)
        wanted = [sample for sample, dropped in members.items() if dropped is None]
        read = await read_samples(connection, self._conversations, wanted)
        await mark_dropped(
            connection, step, {sample: fault for sample, fault in read.items() if isinstance(fault, str)}
        )
        samples = [sample for sample in read.values() if isinstance(sample, BatchSample)]
        held_out = await read_held_out(connection, self._conversations, policy, step.claimed_at, recipe.gate)
        parent_scores = await read_scores(connection, policy, step.parent) if held_out else {}
        batch = await _with_versions(connection, step, recipe, samples, held_out)
        retires = recipe.lessons.enabled and recipe.lessons.retire
        yardstick = await read_replies(connection, self._conversations, policy) if retires else []
        return replace(batch, parent_scores=parent_scores, yardstick=yardstick)

    @transaction
    async def commit(
        self, connection: AsyncConnection, step: StepBatch, trained: TrainedStep, checks: Sequence[GateCheck] = ()
    ) -> StepState:
        version = trained.version
        parent = 0 if step.parent is None else step.parent.n
        if (version.policy, version.n, version.parent) != (step.policy, step.n, parent):
            raise RecordUnusable(
                f"{version.path} is not the version that step {step.n} of policy {step.policy!r} makes"
            )
        policy = await lock_policy(connection, step.policy)
        row = await lock_step(connection, step.policy, step.n)
        if row.state in (StepState.CANDIDATE, StepState.COMMITTED, StepState.REJECTED):
            made = await _made_version(connection, step.policy, step.n)
            return StepState(row.state) if made is not None and made.sha256 == version.sha256 else StepState.ABANDONED
        if row.state != StepState.CLAIMED:
            return StepState(row.state)
        if (policy.head, policy.epoch) == (parent, step.epoch) == (row.parent, row.epoch):
            await propose_step(connection, row, with_hints_lost(step, trained), checks)
            return StepState.CANDIDATE
        await abandon_step(connection, row, moved_on(policy, row))
        return StepState.ABANDONED

    @transaction
    async def quarantine(self, connection: AsyncConnection, policy: str, n: int, reason: str) -> None:
        await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state == StepState.CLAIMED:
            await quarantine_step(connection, step, reason)

    @transaction
    async def set_aside(self, connection: AsyncConnection, policy: str, n: int, reason: str) -> None:
        await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state == StepState.CLAIMED:
            gate = (await recipe_by_hash(connection, step.recipe_hash)).gate
            await set_aside_step(connection, step, reason, gate.pause_after)

    @transaction
    async def abandon(self, connection: AsyncConnection, policy: str, n: int, reason: str) -> None:
        await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state == StepState.CLAIMED:
            await abandon_step(connection, step, reason)

    @transaction
    async def abandon_and_pause(self, connection: AsyncConnection, policy: str, n: int, reason: str) -> None:
        locked = await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CLAIMED:
            return
        if locked.recipe_hash == step.recipe_hash:
            await abandon_step_and_pause(connection, step, reason)
        else:
            await abandon_step(connection, step, reason)

    @transaction
    async def expire(self, connection: AsyncConnection, policy: str, n: int, reason: str) -> None:
        await lock_policy(connection, policy)
        step = await lock_step(connection, policy, n)
        if step.state == StepState.CLAIMED:
            await expire_step(connection, step, reason)

    @transaction
    async def committed(self, connection: AsyncConnection, policy: str, n: int) -> VersionRef | None:
        return await _made_version(connection, policy, n, StepState.COMMITTED)

    @transaction
    async def candidate(self, connection: AsyncConnection, policy: str, n: int) -> VersionRef | None:
        return await _made_version(connection, policy, n, StepState.CANDIDATE)

    @transaction
    async def record(self, connection: AsyncConnection, policy: str, n: int) -> StepRecord | None:
        made = (VersionRow.policy == StepRow.policy) & (VersionRow.n == StepRow.n)
        query = select(StepRow.metrics, VersionRow.created_at).join(VersionRow, made)
        row = (await connection.execute(query.where(StepRow.policy == policy, StepRow.n == n))).one_or_none()
        return None if row is None else StepRecord(policy, n, row.metrics or {}, row.created_at)


async def _update(connection: AsyncConnection, step: StepRow, **values: object) -> None:
    row = update(StepRow).where(StepRow.policy == step.policy, StepRow.n == step.n)
    await connection.execute(row.values(**values))


def _not_claimed(step: StepRow) -> str:
    return f"step {step.n} of policy {step.policy!r} is {step.state}"


async def _claim_new(connection: AsyncConnection, policy: PolicyRow, n: int) -> Claim:
    fault = None if policy.paused_reason is None else f"paused: {policy.paused_reason}"
    recipe = None
    if fault is None:
        recipe, fault = await _usable_recipe(connection, policy.id)
    if recipe is None:
        await set_work_flag(connection, policy.id, False)
        return Claim(policy.id, n, None, reason=fault or "")
    closed = closed_by_canary(policy.canary, policy.pinned) or await read_closed(connection, policy.id, recipe)
    if closed is not None:
        # The work flag stays: the batch is still there when the schedule opens.
        return Claim(policy.id, n, None, reason=closed.reason)
    chosen = await _choose(connection, policy, recipe)
    reason = chosen.reason
    if not chosen.samples:
        # Not set to false: a sample whose turn was locked by another transaction was skipped and still waits.
        await refresh_work_flag(connection, policy.id)
        return Claim(policy.id, n, None, reason=reason)
    await _insert_step(connection, policy, n, recipe, chosen.samples)
    await refresh_work_flag(connection, policy.id)
    if not chosen.full:
        reason += f"; the oldest waited {recipe.train.max_wait_hours:g} h"
    return Claim(policy.id, n, StepState.CLAIMED, len(chosen.samples), reason)


async def _choose(connection: AsyncConnection, policy: PolicyRow, recipe: Recipe) -> Chosen:
    """Samples of chats or of rollout groups: those of which the oldest has waited longer, if both have a batch."""
    chats = await choose_samples(connection, policy.id, recipe, policy.head)
    groups = await choose_groups(connection, policy.id, recipe, policy.head)
    if groups.first is None:
        return chats
    if chats.first is None:
        return groups
    ready = [chosen for chosen in (chats, groups) if chosen.samples]
    if not ready:
        return replace(chats, reason=f"{chats.reason}, {groups.reason}")
    return min(ready, key=lambda chosen: chosen.samples[0])


async def _usable_recipe(connection: AsyncConnection, policy: str) -> tuple[Recipe | None, str | None]:
    """The policy's recipe, or why it has none to train by."""
    try:
        return await recipe_of_policy(connection, policy), None
    except RecordUnusable as error:
        return None, str(error)
    except RecipeRejected as error:
        return None, unusable_recipe(error)


async def _insert_step(
    connection: AsyncConnection, policy: PolicyRow, n: int, recipe: Recipe, samples: list[SampleId]
) -> None:
    row = {"policy": policy.id, "n": n, "parent": policy.head, "epoch": policy.epoch, "recipe_hash": recipe.hash}
    lr_scale = recipe.gate.lr_scale(policy.rejections)
    await connection.execute(insert(StepRow).values(row | {"state": StepState.CLAIMED, "lr_scale": lr_scale}))
    places = [
        {"policy": policy.id, "step": n, "sample_id": sample, "place": place} for place, sample in enumerate(samples)
    ]
    await connection.execute(insert(StepSampleRow), places)
    claimed = update(SampleRow).where(SampleRow.id.in_(samples))
    await connection.execute(claimed.values(state=SampleState.CLAIMED))


async def _with_versions(
    connection: AsyncConnection,
    step: StepRow,
    recipe: Recipe,
    samples: list[BatchSample],
    held_out: Sequence[BatchSample],
) -> StepBatch:
    hinted = {sample.version for sample in samples if sample.hinted_prompts}
    teachers = {n for n in hinted if needs_version(recipe.train, n, step.parent)}
    other_shape = teachers & await versions_of_other_shape(connection, step.policy, recipe.train.lora)
    refs = await version_refs(connection, step.policy, (teachers - other_shape) | {step.parent})
    if step.parent != 0 and step.parent not in refs:
        raise RecordUnusable(f"version {step.parent}, from which step {step.n} begins, has no files any more")
    base = select(PolicyRow.base_model).where(PolicyRow.id == step.policy)
    # Without its hint a sample is still trained by its verdict.
    without_hint = {
        sample.sample_id: f"version {sample.version}, which answered, "
        + ("has a LoRA of another shape" if sample.version in other_shape else "is gone")
        for sample in samples
        if sample.hinted_prompts and sample.version in teachers - refs.keys()
    }
    return StepBatch(
        policy=step.policy,
        base_model=(await connection.execute(base)).scalar_one(),
        n=step.n,
        parent=refs.get(step.parent),
        epoch=step.epoch,
        recipe=recipe,
        samples=[
            replace(sample, hinted_prompts={}) if sample.sample_id in without_hint else sample for sample in samples
        ],
        teachers={n: refs[n] for n in sorted(teachers & refs.keys())},
        without_hint=without_hint,
        lr_scale=step.lr_scale,
        held_out=held_out,
    )


async def _made_version(
    connection: AsyncConnection, policy: str, n: int, state: StepState | None = None
) -> VersionRef | None:
    """The version that a step in this state made; in any state if None."""
    query = (
        select(VersionRow)
        .join(StepRow, (StepRow.policy == VersionRow.policy) & (StepRow.n == VersionRow.n))
        .where(VersionRow.policy == policy, VersionRow.n == n)
    )
    if state is not None:
        query = query.where(StepRow.state == state)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else version_ref(row)
