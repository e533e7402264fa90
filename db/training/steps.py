"""Claims, commits and ends steps: a batch is claimed once, and one step at a time makes a version.

Every change locks the policy's row, so that concurrent changes run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.attempts import Attempts
from clawloop.contracts.gate_checks import GateCheck
from clawloop.contracts.progress import Pace, waiting_words
from clawloop.contracts.step_record import StepRecord
from clawloop.contracts.training import (
    OPEN_STEPS,
    BatchSample,
    Claim,
    SampleState,
    StepBatch,
    StepState,
    TrainedStep,
    TrainingView,
    VersionRef,
)
from clawloop.errors import RecipeRejected, RecordUnusable
from clawloop.ids import SampleId
from clawloop.recipes.recipe import Recipe
from db.database import Database, transaction
from db.exact_json import storable
from db.tables import PolicyRow, SampleRow, StepRow, StepSampleRow, VersionRow
from db.training.batches import needs_version, read_samples
from db.training.claims import Chosen, choose_samples
from db.training.group_claims import choose_groups
from db.training.held_out import read_held_out
from db.training.lineage import next_step, version_ref, version_refs, versions_of_other_shape
from db.training.policies import lock_policy
from db.training.recipes import recipe_by_hash, recipe_of_policy
from db.training.schedule import closed_by_canary, read_closed
from db.training.status import described, read_status, unusable_recipe
from db.training.step_transitions import (
    abandon_step,
    abandon_step_and_pause,
    expire_step,
    lock_step,
    mark_dropped,
    moved_on,
    propose_step,
    quarantine_step,
    samples_of,
    set_aside_step,
    with_hints_lost,
)
from db.training.work_flag import refresh_work_flag, set_work_flag
from db.turns.conversation_cache import ConversationCache

_NO_PACE: Final = {"tokens_a_second": None, "seconds_left": None}


class PostgresStepStore:
    """Implements `activities.training.steps.StepStore`.

    Args:
        conversations: a cache to share with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
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
        return await _with_versions(connection, step, recipe, samples, held_out)

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
    hinted = {sample.version for sample in samples if sample.hinted_prompt_ids is not None}
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
        if sample.hinted_prompt_ids is not None and sample.version in teachers - refs.keys()
    }
    return StepBatch(
        policy=step.policy,
        base_model=(await connection.execute(base)).scalar_one(),
        n=step.n,
        parent=refs.get(step.parent),
        epoch=step.epoch,
        recipe=recipe,
        samples=[
            replace(sample, hinted_prompt_ids=None) if sample.sample_id in without_hint else sample
            for sample in samples
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
