"""Ends a step: committed, abandoned, expired or quarantined, with its samples and their turns.

Every function works in the caller's transaction, which must hold the policy's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import SampleState, StepBatch, StepState, TrainedStep
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import SampleId
from db.exact_json import exact_json, storable
from db.tables import PolicyRow, StepRow, StepSampleRow, VersionRow
from db.training.policies import insert_event
from db.training.samples import end_samples, free_samples
from db.training.work_flag import refresh_work_flag


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
    for sample, why in dropped.items():
        row = update(StepSampleRow).where(
            StepSampleRow.policy == step.policy, StepSampleRow.step == step.n, StepSampleRow.sample_id == sample
        )
        await connection.execute(row.values(dropped=storable(why)))


async def commit_step(connection: AsyncConnection, step: StepRow, trained: TrainedStep) -> None:
    """Make the trained version the policy's head."""
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
    samples = await samples_of(connection, step)
    trained_samples = {
        sample: trained_detail(step.n, trained.figures.without_hint.get(sample))
        for sample, dropped in samples.items()
        if dropped is None
    }
    left_out = {sample: f"left out of step {step.n}: {why}" for sample, why in samples.items() if why is not None}
    await end_samples(connection, trained_samples, SampleState.TRAINED, TurnOutcome.TRAINED)
    await end_samples(connection, left_out, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await _end(connection, step, StepState.COMMITTED, None, exact_json(metrics_of(trained)))
    await connection.execute(update(PolicyRow).where(PolicyRow.id == step.policy).values(head=step.n))


async def abandon_step(connection: AsyncConnection, step: StepRow, reason: str) -> None:
    """Make the step's samples fresh again; they expire if the recipe's [signal] table has changed."""
    await _end(connection, step, StepState.ABANDONED, reason)
    samples = await samples_of(connection, step)
    await free_samples(connection, step.policy, list(samples))
    await insert_event(connection, step.policy, "step_abandoned", step=step.n, reason=reason)
    await refresh_work_flag(connection, step.policy)


async def abandon_step_and_pause(connection: AsyncConnection, step: StepRow, reason: str) -> None:
    """Make the step's samples fresh again, and pause the policy."""
    await _pause(connection, step, f"step {step.n}: {reason}")
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
    why = f"step {step.n}: {reason}"
    await _end(connection, step, StepState.QUARANTINED, reason)
    samples = await samples_of(connection, step)
    await end_samples(connection, dict.fromkeys(samples, why), SampleState.QUARANTINED, TurnOutcome.QUARANTINED)
    await _pause(connection, step, why)
    await insert_event(connection, step.policy, "quarantined", step=step.n, reason=reason, samples=len(samples))
    await refresh_work_flag(connection, step.policy)


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
    return {
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
    }


async def _pause(connection: AsyncConnection, step: StepRow, why: str) -> None:
    paused = {"paused_reason": storable(why), "paused_at": func.coalesce(PolicyRow.paused_at, func.now())}
    await connection.execute(update(PolicyRow).where(PolicyRow.id == step.policy).values(paused))


async def _end(
    connection: AsyncConnection, step: StepRow, state: StepState, reason: str | None, metrics: str | None = None
) -> None:
    values = {"state": state, "reason": None if reason is None else storable(reason), "finished_at": func.now()}
    row = update(StepRow).where(StepRow.policy == step.policy, StepRow.n == step.n)
    await connection.execute(row.values(values | ({} if metrics is None else {"metrics": metrics})))
