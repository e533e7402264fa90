"""Publishing, in memory and in PostgreSQL."""

from __future__ import annotations

from datetime import timedelta

import pytest

from clawloop.core.contracts.adapter_directory import AdapterDirectory
from clawloop.core.contracts.training import StepState
from clawloop.core.errors import RecordUnusable, StateConflict
from db.serving.publishing import PostgresPublishingStore
from tests.contract.learning import HOURS, POLICY, Learning, PostgresLearning, commit, publish, step, trained

MINUTE = timedelta(minutes=1)


async def names(learning: Learning, engine: str) -> list[int]:
    return [version.n for version in await learning.publishing.wanted(engine)]


async def removable(learning: Learning) -> list[int]:
    return [version.n for version in await learning.publishing.removable(1 * HOURS)]


async def unloadable(learning: Learning, engine: str) -> list[int]:
    return [version.n for version in await learning.publishing.unloadable(engine, MINUTE)]


async def test_engines_should_have_the_head_the_active_and_the_pinned_version(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    assert await names(learning, engine) == []
    for n in (1, 2, 3):
        await step(learning, n)
    assert await names(learning, engine) == [3]
    await publish(learning, 3, engine)
    await step(learning, 4)
    await learning.operators.pin(POLICY, 1)
    assert await names(learning, engine) == [1, 3, 4]
    assert (await learning.publishing.wanted(engine))[0] == await learning.steps.committed(POLICY, 1)


async def test_engines_should_have_what_somebody_wants_to_ask_for_a_while(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2, 3, 4):
        await step(learning, n)
    store = PostgresPublishingStore(learning.database)
    await store.want_for(POLICY, [1, 2], MINUTE)
    assert await names(learning, engine) == [1, 2, 4]
    # Another question takes the place of the one before: engines have few slots.
    await store.want_for(POLICY, [2, 3], MINUTE)
    assert await names(learning, engine) == [2, 3, 4]
    await store.want_for(POLICY, [2, 3], timedelta(0))
    assert await names(learning, engine) == [4]
    with pytest.raises(RecordUnusable):
        await store.want_for("nobody", [1], MINUTE)


async def test_loaded_versions_of_an_engine_are_recorded_and_forgotten(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(learning, n)
        await learning.publishing.loaded(engine, POLICY, n)
        await learning.publishing.loaded(engine, POLICY, n)
    await learning.publishing.unloaded(engine, POLICY, 1)
    (found,) = await learning.publishing.engines()
    assert (found.id, found.versions, found.draining, found.problem) == (engine, {POLICY: frozenset({2})}, False, None)
    await learning.publishing.report(engine, "it does not load v2")
    await learning.publishing.forget(engine)
    (found,) = await learning.publishing.engines()
    assert (found.versions, found.problem) == ({}, "it does not load v2")
    await learning.publishing.report(engine, None)
    assert (await learning.publishing.engines())[0].problem is None


async def test_an_unknown_version_cannot_be_loaded(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    with pytest.raises(RecordUnusable):
        await learning.publishing.loaded(engine, POLICY, 7)
    with pytest.raises(RecordUnusable, match="version 7"):
        await learning.publishing.activate(POLICY, 7, 0)


async def test_a_version_is_activated_once_an_engine_in_rotation_has_it(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    await step(learning, 1)
    assert not await learning.publishing.activate(POLICY, 1, 0)
    await learning.publishing.loaded(engine, POLICY, 1)
    await learning.drain(engine)
    assert not await learning.publishing.activate(POLICY, 1, 0)
    other = await learning.add_engine("http://e2:8100")
    assert await publish(learning, 1, other)
    assert await learning.publishing.activate(POLICY, 1, 0)
    view = await learning.steps.status(POLICY)
    assert (view.version, view.unpublished) == (1, False)


async def test_an_engine_that_rejects_one_version_may_serve_another(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(learning, n)
    await publish(learning, 2, engine)
    # It was restarted, and the directory of the version that answers is damaged.
    await learning.publishing.forget(engine)
    await learning.publishing.report(engine, "default-v2: holds 0123, expected 4567")
    await learning.operators.roll_back(POLICY, 1)
    assert (await learning.steps.status(POLICY)).version == 2
    await learning.publishing.loaded(engine, POLICY, 1)
    assert await learning.publishing.activate(POLICY, 1, 1)
    assert (await learning.steps.status(POLICY)).version == 1


async def test_activation_only_moves_forward(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2, 3):
        await step(learning, n)
    assert await publish(learning, 2, engine)
    assert not await publish(learning, 1, engine)
    assert await publish(learning, 3, engine)
    assert not await learning.publishing.activate(POLICY, 2, 0)
    assert (await learning.steps.status(POLICY)).version == 3


async def test_a_roll_back_invalidates_a_publishing_in_progress(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2, 3):
        await step(learning, n)
        await learning.publishing.loaded(engine, POLICY, n)
    await learning.publishing.activate(POLICY, 3, 0)
    await learning.operators.roll_back(POLICY, 1)
    assert not await learning.publishing.activate(POLICY, 3, 0)
    assert not await learning.publishing.activate(POLICY, 3, 1)  # nor off the path
    assert (await learning.steps.status(POLICY)).version == 1


async def test_a_rolled_back_version_is_replaced_once_an_engine_has_the_other(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(learning, n)
    await publish(learning, 2, engine)
    view = await learning.operators.roll_back(POLICY, 1)
    assert (view.head, view.version, view.epoch, view.unpublished) == (1, 2, 1, True)
    assert await names(learning, engine) == [1, 2]
    await learning.publishing.loaded(engine, POLICY, 1)
    assert not await learning.publishing.activate(POLICY, 1, 0)  # what began before the roll-back
    assert await publish(learning, 1, engine)
    assert (await learning.steps.status(POLICY)).version == 1


async def test_a_pinned_version_stays_active_whatever_is_trained(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(learning, n)
        await publish(learning, n, engine)
    view = await learning.operators.pin(POLICY, 1)
    assert (view.version, view.pinned, view.unpublished) == (1, 1, False)
    await step(learning, 3)
    assert not await publish(learning, 3, engine)
    assert not (await learning.steps.status(POLICY)).unpublished
    view = await learning.operators.unpin(POLICY)
    assert (view.version, view.pinned) == (3, None)


async def test_an_old_version_is_unloadable_a_while_after_its_retirement(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(learning, n)
        await publish(learning, n, engine)
    assert await unloadable(learning, engine) == []
    await learning.age(2 * MINUTE)
    assert await unloadable(learning, engine) == [1]
    await learning.operators.pin(POLICY, 1)
    assert await unloadable(learning, engine) == []
    await learning.operators.unpin(POLICY)
    await learning.age(2 * MINUTE)
    await learning.publishing.unloaded(engine, POLICY, 1)
    assert await unloadable(learning, engine) == []


async def test_a_version_that_was_never_active_is_unloadable_too(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    await step(learning, 1)
    await learning.publishing.loaded(engine, POLICY, 1)
    await step(learning, 2)
    assert await unloadable(learning, engine) == []
    await learning.age(2 * MINUTE)
    assert await unloadable(learning, engine) == [1]


async def test_files_of_unneeded_versions_are_removable(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in range(1, 7):
        await step(learning, n)
    await publish(learning, 6, engine)
    assert await removable(learning) == []
    await learning.age(2 * HOURS)
    assert await removable(learning) == [1, 2, 3]  # the last three of the path stay
    await learning.publishing.loaded(engine, POLICY, 1)
    await learning.operators.pin(POLICY, 2)
    await learning.add_samples(1, version=3, hinted=[1, 2])
    assert await removable(learning) == []
    await learning.publishing.unloaded(engine, POLICY, 1)
    assert await removable(learning) == [1]
    assert not await learning.publishing.mark_removed(POLICY, 1, 9 * HOURS)
    assert await learning.publishing.mark_removed(POLICY, 1, 1 * HOURS)
    assert not await learning.publishing.mark_removed(POLICY, 1, 1 * HOURS)
    assert await removable(learning) == []
    assert [version.state for version in await learning.operators.versions(POLICY)][1] == "on the path, files removed"


async def test_a_version_wanted_since_it_was_listed_as_removable_keeps_its_files(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in range(1, 7):
        await step(learning, n)
    await publish(learning, 6, engine)
    await learning.age(2 * HOURS)
    assert await removable(learning) == [1, 2, 3]
    await learning.operators.roll_back(POLICY, 2)
    await learning.operators.pin(POLICY, 2)
    assert not await learning.publishing.mark_removed(POLICY, 2, 1 * HOURS)
    assert not await learning.publishing.mark_removed(POLICY, 1, 1 * HOURS)  # of the newest on the path now
    assert await learning.publishing.mark_removed(POLICY, 3, 1 * HOURS)
    with pytest.raises(StateConflict, match="were removed"):
        await learning.operators.pin(POLICY, 3)


async def test_the_parent_of_a_claimed_step_keeps_its_files(learning: Learning) -> None:
    await learning.add_engine("http://e1:8100")
    for n in range(1, 6):
        await step(learning, n)
    await learning.operators.roll_back(POLICY, 1)
    await learning.add_samples(4, version=1)
    await learning.steps.claim(POLICY, 6)
    batch = await learning.steps.batch(POLICY, 6)
    await learning.age(2 * HOURS)
    assert await removable(learning) == [2, 3, 4, 5]
    assert await commit(learning, batch, trained(batch)) is StepState.COMMITTED
    assert [version.n for version in await learning.publishing.removable(1 * HOURS)] == [2, 3, 4, 5]


async def test_directories_of_ended_steps_without_a_version_are_leftover(learning: Learning) -> None:
    batch = await step(learning, 1)
    own = trained(batch).version.path
    await learning.add_samples(4)
    await learning.steps.claim(POLICY, 2)
    there = [
        AdapterDirectory(POLICY, 1, own),
        AdapterDirectory(POLICY, 1, f"{POLICY}/v1-ffffffffffff"),
        AdapterDirectory(POLICY, 2, f"{POLICY}/v2-ffffffffffff"),  # may be committed yet
        AdapterDirectory(POLICY, 3, f"{POLICY}/v3-ffffffffffff"),  # perhaps of another installation
        AdapterDirectory("other", 1, "other/v1-ffffffffffff"),
    ]
    assert await learning.publishing.leftover(there) == [there[1]]
    await learning.steps.abandon(POLICY, 2, "rolled back")
    assert await learning.publishing.leftover(there) == [there[1], there[2]]
