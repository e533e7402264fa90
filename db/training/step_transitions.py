"""Moves a step on: candidate, committed, rejected, abandoned, expired or quarantined, with its samples and their turns.

Every function works in the caller's transaction, which must hold the policy's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import JsonValue
from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from clawloop.contracts.gate_checks import GateCheck
from clawloop.contracts.training import Distance, SampleState, StepBatch, StepState, TrainedStep
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import SampleId
from db.arrays import advantages_to_bytes
from db.content import content_of
from db.content_rows import step_sample_row
from db.exact_json import exact_json, storable
from db.tables import PolicyRow, StepRow, StepSampleRow, VersionRow
from db.training.gate_checks import insert_checks
from db.training.policies import insert_event
from db.training.samples import end_samples, free_samples
from db.training.work_flag import refresh_work_flag

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
    await insert_checks(connection, step.policy, step.n, checks)
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
