"""The ledger of steps in PostgreSQL: a batch is claimed once, and one step at a time moves a policy's head.

Every change holds the policy's row, so that of two at the same moment one comes first and the other sees it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import (
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
from db.database import Database
from db.tables import PolicyRow, SampleRow, StepRow, StepSampleRow, VersionRow
from db.training.batches import needs_version, read_samples
from db.training.claims import choose_samples
from db.training.lineage import next_step, of_other_shape, version_ref, version_refs
from db.training.queue import lock_policy, refresh_work, set_work
from db.training.recipes import recipe_by_hash, recipe_of_policy
from db.training.status import unusable_words, view_of
from db.training.step_transitions import (
    abandon_step,
    commit_step,
    expire_step,
    hand_back_step,
    lock_step,
    mark_dropped,
    quarantine_step,
    samples_of,
    with_hints_lost,
)
from db.turns.conversation_cache import ConversationCache


class PostgresStepStore:
    """Satisfies `activities.training.ports.StepStore`.

    Args:
        chains: share them with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()

    async def look(self, policy: str) -> TrainingView:
        """
        Raises:
            StoreUnavailable
            RecordUnusable: there is no such policy.
        """
        return await self._database.run(lambda connection: view_of(connection, policy))

    async def claim(self, policy: str, n: int) -> Claim:
        """A batch for step `n`, once: asked again, the same batch. Expires what it cannot use, with a reason.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such policy.
        """
        return await self._database.run(partial(self._claim, policy, n))

    async def batch(self, policy: str, n: int) -> StepBatch:
        """What a claimed step takes: the same whenever it is asked for, less what was erased. Counts an attempt.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such step, it is over, or its parent's files are gone.
        """
        return await self._database.run(partial(self._batch, policy, n))

    async def commit(self, step: StepBatch, trained: TrainedStep) -> StepState:
        """By compare-and-set: committed if the policy's head and epoch are the batch's, else abandoned.

        Twice is once. Abandoned is also said of an adapter that another one of the same step came before.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such step, or the trained version is not what it makes.
        """
        return await self._database.run(partial(_commit, step, trained))

    async def quarantine(self, policy: str, n: int, reason: str) -> None:
        """Set a claimed step's samples aside and pause training; nothing if the step is over.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such step.
        """
        await self._database.run(partial(_quarantine, policy, n, reason))

    async def abandon(self, policy: str, n: int, reason: str) -> None:
        """Give a claimed step up, its samples are free again; nothing if the step is over.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such step.
        """
        await self._database.run(partial(_abandon, policy, n, reason))

    async def hand_back(self, policy: str, n: int, reason: str) -> None:
        """Give a claimed step up whose recipe cannot be used: its samples are free again, and training pauses.

        Nothing if the step is over; no pause if the policy has another recipe by now.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such step.
        """
        await self._database.run(partial(_hand_back, policy, n, reason))

    async def expire(self, policy: str, n: int, reason: str) -> None:
        """Give a claimed step up that teaches nothing, its samples expire; nothing if the step is over.

        Raises:
            StoreUnavailable
            RecordUnusable: there is no such step.
        """
        await self._database.run(partial(_expire, policy, n, reason))

    async def committed(self, policy: str, n: int) -> VersionRef | None:
        """The version step `n` made; None if it is not committed.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_committed, policy, n))

    async def _claim(self, policy: str, n: int, connection: AsyncConnection) -> Claim:
        held = await lock_policy(connection, policy)
        query = select(StepRow).where(StepRow.policy == policy, StepRow.n == n)
        if (known := (await connection.execute(query)).one_or_none()) is not None:
            taken = await samples_of(connection, await lock_step(connection, policy, n))
            return Claim(n, StepState(known.state), len(taken), known.reason or f"{len(taken)} samples")
        under_way = select(StepRow.n).where(StepRow.policy == policy, StepRow.state == StepState.CLAIMED)
        if (other := await connection.scalar(under_way)) is not None:
            return Claim(n, None, 0, f"step {other} is claimed")
        if n != (expected := await next_step(connection, policy)):
            return Claim(n, None, 0, f"the next step is {expected}")
        return await self._claim_new(connection, held, n)

    async def _claim_new(self, connection: AsyncConnection, policy: PolicyRow, n: int) -> Claim:
        fault = None if policy.paused_reason is None else f"paused: {policy.paused_reason}"
        recipe = None
        if fault is None:
            recipe, fault = await _usable_recipe(connection, policy.id)
        if recipe is None:
            await set_work(connection, policy.id, False)
            return Claim(n, None, 0, fault or "")
        chosen = await choose_samples(connection, self._conversations, policy.id, recipe, policy.head)
        words = f"{chosen.found} of {recipe.train.batch_samples} samples"
        if not chosen.samples:
            # Not always false: a sample whose turn is being judged anew or moved was passed over, and still waits.
            await refresh_work(connection, policy.id)
            return Claim(n, None, 0, words)
        await _insert_step(connection, policy, n, recipe, chosen.samples)
        await refresh_work(connection, policy.id)
        if chosen.found < recipe.train.batch_samples:
            words += f"; the oldest waited {recipe.train.max_wait_hours:g} h"
        return Claim(n, StepState.CLAIMED, len(chosen.samples), words)

    async def _batch(self, policy: str, n: int, connection: AsyncConnection) -> StepBatch:
        step = await lock_step(connection, policy, n)
        if step.state != StepState.CLAIMED:
            raise RecordUnusable(f"step {n} of policy {policy!r} is {step.state}")
        recipe = await recipe_by_hash(connection, step.recipe_hash)
        members = await samples_of(connection, step)
        wanted = [sample for sample, dropped in members.items() if dropped is None]
        read = await read_samples(connection, self._conversations, wanted)
        lost = {sample: str(found) for sample, found in read.items() if isinstance(found, RecordUnusable)}
        await mark_dropped(connection, step, lost)
        samples = [found for found in read.values() if isinstance(found, BatchSample)]
        row = update(StepRow).where(StepRow.policy == policy, StepRow.n == n).values(attempt=StepRow.attempt + 1)
        await connection.execute(row)
        return await _with_versions(connection, step, recipe, samples)


async def _usable_recipe(connection: AsyncConnection, policy: str) -> tuple[Recipe | None, str | None]:
    """The policy's present recipe, or why there is none to train by."""
    try:
        return await recipe_of_policy(connection, policy), None
    except RecordUnusable as error:
        return None, str(error)
    except RecipeRejected as error:
        return None, unusable_words(error)


async def _insert_step(
    connection: AsyncConnection, policy: PolicyRow, n: int, recipe: Recipe, samples: list[SampleId]
) -> None:
    row = {"policy": policy.id, "n": n, "parent": policy.head, "epoch": policy.epoch, "recipe_hash": recipe.hash}
    await connection.execute(insert(StepRow).values(row | {"state": StepState.CLAIMED}))
    places = [
        {"policy": policy.id, "step": n, "sample_id": sample, "place": place} for place, sample in enumerate(samples)
    ]
    await connection.execute(insert(StepSampleRow), places)
    taken = update(SampleRow).where(SampleRow.id.in_(samples))
    await connection.execute(taken.values(state=SampleState.CLAIMED))


async def _with_versions(
    connection: AsyncConnection, step: StepRow, recipe: Recipe, samples: list[BatchSample]
) -> StepBatch:
    hinted = {sample.version for sample in samples if sample.hinted_prompt_ids is not None}
    teachers = {n for n in hinted if needs_version(recipe.train, n, step.parent)}
    other_shape = teachers & await of_other_shape(connection, step.policy, recipe.train.lora)
    refs = await version_refs(connection, step.policy, (teachers - other_shape) | {step.parent})
    if step.parent != 0 and step.parent not in refs:
        raise RecordUnusable(f"version {step.parent}, from which step {step.n} begins, has no files any more")
    base = select(PolicyRow.base_model).where(PolicyRow.id == step.policy)
    # The verdict still teaches where nobody can read the hint any more.
    without_hint = {
        sample.sample_id: f"version {sample.version}, which would read it, "
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
    )


async def _commit(step: StepBatch, trained: TrainedStep, connection: AsyncConnection) -> StepState:
    version = trained.version
    parent = 0 if step.parent is None else step.parent.n
    if (version.policy, version.n, version.parent) != (step.policy, step.n, parent):
        raise RecordUnusable(f"{version.path} is not what step {step.n} of policy {step.policy!r} makes")
    policy = await lock_policy(connection, step.policy)
    row = await lock_step(connection, step.policy, step.n)
    if row.state == StepState.COMMITTED:
        made = await _committed(step.policy, step.n, connection)
        return StepState.COMMITTED if made is not None and made.sha256 == version.sha256 else StepState.ABANDONED
    if row.state != StepState.CLAIMED:
        return StepState(row.state)
    if (policy.head, policy.epoch) == (parent, step.epoch) == (row.parent, row.epoch):
        await commit_step(connection, row, with_hints_lost(step, trained))
        return StepState.COMMITTED
    went_on = f"the policy went on to version {policy.head} in epoch {policy.epoch}"
    await abandon_step(connection, row, f"{went_on}; it began from {parent} in epoch {step.epoch}")
    return StepState.ABANDONED


async def _quarantine(policy: str, n: int, reason: str, connection: AsyncConnection) -> None:
    await lock_policy(connection, policy)
    step = await lock_step(connection, policy, n)
    if step.state == StepState.CLAIMED:
        await quarantine_step(connection, step, reason)


async def _abandon(policy: str, n: int, reason: str, connection: AsyncConnection) -> None:
    await lock_policy(connection, policy)
    step = await lock_step(connection, policy, n)
    if step.state == StepState.CLAIMED:
        await abandon_step(connection, step, reason)


async def _hand_back(policy: str, n: int, reason: str, connection: AsyncConnection) -> None:
    held = await lock_policy(connection, policy)
    step = await lock_step(connection, policy, n)
    if step.state != StepState.CLAIMED:
        return
    if held.recipe_hash == step.recipe_hash:
        await hand_back_step(connection, step, reason)
    else:
        await abandon_step(connection, step, reason)


async def _expire(policy: str, n: int, reason: str, connection: AsyncConnection) -> None:
    await lock_policy(connection, policy)
    step = await lock_step(connection, policy, n)
    if step.state == StepState.CLAIMED:
        await expire_step(connection, step, reason)


async def _committed(policy: str, n: int, connection: AsyncConnection) -> VersionRef | None:
    query = (
        select(VersionRow)
        .join(StepRow, (StepRow.policy == VersionRow.policy) & (StepRow.n == VersionRow.n))
        .where(VersionRow.policy == policy, VersionRow.n == n, StepRow.state == StepState.COMMITTED)
    )
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else version_ref(row)
