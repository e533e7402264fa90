"""Operators' views and changes of a policy: recipes, roll-backs, publishing, beginnings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from clawloop.core.adapters.directory import check_version
from clawloop.core.contracts.serving import AdapterDirectory, Scope
from clawloop.core.contracts.training import (
    BroughtAdapter,
    CheckResult,
    GateCheck,
    SampleState,
    StepState,
    TrainingState,
    VersionOrigin,
    VersionRef,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound, RecipeRejected, RecordUnusable, SetupError, StateConflict
from clawloop.core.gate.checks import NUMBERS
from clawloop.core.ids import SessionId
from clawloop.core.recipes.recipe import Lora, Recipe
from db.erasure import PostgresErasureStore
from db.invariants import committed_versions, violations
from db.recovery import PostgresRecoveryStore
from db.serving.directory import PostgresDirectoryStore
from db.serving.keys import PostgresKeyStore
from db.serving.publishing import PostgresPublishingStore
from db.training.policies import versions_of_other_shape
from db.training.recipes import read_recipe_of, set_recipe
from db.training.status import PostgresTrainingBrowser
from db.training.work_flag import PostgresWorkStore
from tests.conftest import execute
from tests.contract.learning import (
    HOURS,
    POLICY,
    RECIPE,
    Learning,
    PostgresLearning,
    commit,
    publish,
    recipe,
    reject,
    step,
    trained,
)
from tests.contract.test_claims import scheduled
from tests.training.test_merge import base_and_adapter
from tests.verbs import Done, clawloop, refusal

# Operators' views and changes of training, in memory and in PostgreSQL.


async def test_an_unknown_policy_is_not_found(learning: Learning) -> None:
    operators = learning.operators
    for call in (
        operators.status("other"),
        operators.versions("oth\0er"),
        operators.pause("other", "why"),
        operators.resume("other"),
        operators.roll_back("other", 0),
        operators.release("other", 1),
        operators.pin("other", 0),
        operators.unpin("other"),
        operators.recipe("oth\0er"),
        operators.set_recipe("other", RECIPE),
    ):
        with pytest.raises(NotFound, match="no policy") as raised:
            await call
        assert (raised.value.code, raised.value.field) == ("policy_not_found", "policy")


async def test_an_unknown_or_removed_version_is_rejected(learning: Learning) -> None:
    await step(learning, 1)
    await step(learning, 2)
    for call in (learning.operators.roll_back(POLICY, 5), learning.operators.pin(POLICY, 5)):
        with pytest.raises(NotFound, match="no version 5") as raised:
            await call
        assert (raised.value.code, raised.value.field) == ("version_not_found", "version")
    await learning.lose_files(1)
    for call in (learning.operators.roll_back(POLICY, 1), learning.operators.pin(POLICY, 1)):
        with pytest.raises(StateConflict, match="were removed") as conflict:
            await call
        assert conflict.value.code == "version_removed"


async def test_setting_a_recipe_expires_waiting_samples_of_another_signal_for_good(
    learning: Learning,
) -> None:
    waiting = await learning.add_samples(3)
    same_signal = recipe(batch_samples=3, drift=0.5)
    view = await learning.operators.set_recipe(POLICY, same_signal)
    assert (view.ready, view.needed) == (3, 3)
    assert await learning.work_waiting()
    assert await learning.operators.recipe(POLICY) == same_signal

    view = await learning.operators.set_recipe(POLICY, Recipe.model_validate({"name": "small", "signal": {"m": 5}}))
    assert (view.ready, view.oldest_seconds) == (0, None)
    assert not await learning.work_waiting()
    changed = (SampleState.EXPIRED, TurnOutcome.EXPIRED, "recipe changed")
    assert [await learning.sample_result(sample) for sample in waiting] == [changed] * 3

    view = await learning.operators.set_recipe(POLICY, same_signal)
    assert view.ready == 0  # expired samples stay expired, although the policy has their [signal] table again
    assert [await learning.sample_result(sample) for sample in waiting] == [changed] * 3


async def test_samples_claimed_while_the_signal_changed_expire_when_the_step_is_abandoned(
    learning: Learning,
) -> None:
    steps, operators = learning.steps, learning.operators

    async def resumed(n: int) -> None:
        await steps.quarantine(POLICY, n, "not finite")
        await operators.resume(POLICY, retry_quarantined=True)

    gives_up: list[Callable[[int], Awaitable[object]]] = [
        lambda n: steps.abandon_and_pause(POLICY, n, "the recipe does not fit"),
        lambda n: steps.abandon(POLICY, n, "the trainer is gone"),
        lambda n: operators.roll_back(POLICY, 0),
        resumed,
    ]
    for n, give_up in enumerate(gives_up, start=1):
        claimed = await learning.add_samples(4)
        await steps.claim(POLICY, n)
        await operators.set_recipe(POLICY, Recipe.model_validate(RECIPE.model_dump() | {"signal": {"m": 4 + n}}))
        later = await learning.add_samples(1)
        await give_up(n)
        changed = (SampleState.EXPIRED, TurnOutcome.EXPIRED, "recipe changed")
        assert [await learning.sample_result(sample) for sample in claimed] == [changed] * 4
        assert (await learning.sample_result(*later))[0] is SampleState.FRESH
        assert not await learning.work_waiting()
        await operators.set_recipe(POLICY, RECIPE)  # lets the later one expire


async def test_a_sample_judged_by_the_previous_recipe_is_not_ready(learning: Learning) -> None:
    await learning.add_samples(4)
    await learning.set_recipe(Recipe.model_validate({"name": "small", "signal": {"m": 5}}))
    view = await learning.operators.status(POLICY)
    assert (view.ready, view.oldest_seconds) == (0, None)


async def test_a_pause_lasts_until_resumed(learning: Learning) -> None:
    assert (await learning.operators.pause(POLICY, "first")).reason == "paused: first"
    assert (await learning.operators.pause(POLICY, "second")).reason == "paused: second"
    assert (await learning.operators.status(POLICY)).state is TrainingState.PAUSED
    assert (await learning.operators.resume(POLICY)).state is TrainingState.WAITING
    assert (await learning.operators.resume(POLICY)).state is TrainingState.WAITING


async def test_a_roll_back_changes_outcomes_and_rolling_forward_restores_them(
    learning: Learning,
) -> None:
    engine = await learning.add_engine("http://e1:8100")
    batches = {n: await step(learning, n) for n in (1, 2, 3)}
    for n in (1, 3):
        await learning.publishing.loaded(engine, POLICY, n)
    assert await publish(learning, 3, engine)
    view = await learning.operators.roll_back(POLICY, 1)
    assert (view.head, view.version, view.epoch, view.step, view.unpublished) == (1, 1, 1, 4, False)
    kept, undone = batches[1].samples[0].sample_id, batches[3].samples[0].sample_id
    assert (await learning.sample_result(kept))[1:] == (TurnOutcome.TRAINED, "trained in step 1")
    assert await learning.sample_result(undone) == (
        SampleState.TRAINED,  # it is not trained once more
        TurnOutcome.ROLLED_BACK,
        "trained in step 3, rolled back to 1",
    )
    await learning.operators.roll_back(POLICY, 3)
    assert (await learning.sample_result(undone))[1:] == (TurnOutcome.TRAINED, "trained in step 3")
    assert (await learning.operators.status(POLICY)).epoch == 2


async def test_a_roll_back_abandons_the_claimed_step(learning: Learning) -> None:
    await step(learning, 1)
    await learning.add_samples(4, version=1)
    await learning.steps.claim(POLICY, 2)
    await learning.operators.roll_back(POLICY, 0)
    claim = await learning.steps.claim(POLICY, 2)
    assert (claim.state, claim.reason) == (StepState.ABANDONED, "rolled back to version 0")


async def test_a_roll_back_with_a_recipe_frees_the_step_s_samples_for_that_recipe_alone(learning: Learning) -> None:
    await step(learning, 1)
    await learning.add_samples(4, version=1)
    await learning.steps.claim(POLICY, 2)
    same_signal = recipe(batch_samples=3, drift=0.5)
    view = await learning.operators.roll_back(POLICY, 0, same_signal)
    assert (view.head, view.ready, view.needed) == (0, 4, 3)
    assert await learning.operators.recipe(POLICY) == same_signal
    claimed = await learning.steps.claim(POLICY, view.step)
    assert (claimed.state, claimed.samples) == (StepState.CLAIMED, 3)
    other_signal = Recipe.model_validate(same_signal.model_dump() | {"signal": {"m": 5}})
    assert (await learning.operators.roll_back(POLICY, 1, other_signal)).ready == 0


async def test_a_roll_back_with_a_recipe_that_cannot_start_there_changes_nothing(
    postgres_learning: PostgresLearning,
) -> None:
    operators, learned = postgres_learning.operators, recipe(lora={"rank": 8, "alpha": 16.0})
    await operators.set_recipe(POLICY, learned)
    for n in (1, 2):
        await step(postgres_learning, n)
    other_shape = recipe(lora={"rank": 16, "alpha": 16.0})
    with pytest.raises(RecipeRejected, match="version 1 of policy"):
        await operators.roll_back(POLICY, 1, other_shape)
    assert ((await operators.status(POLICY)).head, await operators.recipe(POLICY)) == (2, learned)
    view = await operators.roll_back(POLICY, 0, other_shape)  # version 0 has no adapter
    assert (view.head, await operators.recipe(POLICY)) == (0, other_shape)


async def test_a_pinned_version_prevents_a_roll_back_to_another(learning: Learning) -> None:
    for n in (1, 2):
        await step(learning, n)
    await learning.operators.pin(POLICY, 2)
    with pytest.raises(StateConflict, match="unpin first") as conflict:
        await learning.operators.roll_back(POLICY, 1)
    assert conflict.value.code == "version_pinned"
    await learning.operators.unpin(POLICY)
    assert (await learning.operators.roll_back(POLICY, 1)).head == 1


async def test_versions_show_their_state_and_their_steps_metrics(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    for n in (1, 2):
        await step(learning, n)
    await publish(learning, 2, engine)
    await learning.operators.roll_back(POLICY, 1)
    base, first, second = await learning.operators.versions(POLICY)
    assert (base.n, base.parent, base.state, base.metrics, base.engines) == (0, None, "on the path", None, [])
    assert (first.n, first.parent, first.state, first.active) == (1, 0, "head", False)
    assert (second.state, second.engines, second.active) == ("active, rolled back", [engine], True)
    assert first.metrics == {
        "loss": 0.5,
        "parts": {"policy_gradient": 0.4, "kl": 0.1},
        "grad_norm": 1.5,
        "ratio": 1.01,
        "kl": 0.02,
        "tokens": 8,
        "samples": 4,
        "dropped": 0,
        "without_hint": 0,
        "seconds": 2.5,
        "to_parent": None,
        "to_base": None,
    }


async def test_a_new_policy_begins_at_the_base_model_and_learns_by_itself(learning: Learning) -> None:
    await step(learning, 1)
    small = recipe(batch_samples=3)
    mine = await learning.operators.create_policy("mine", POLICY, small)
    assert (mine.policy, mine.version, mine.head, mine.needed) == ("mine", 0, 0, 3)
    yours = await learning.operators.create_policy("yours", POLICY, None)
    assert (yours.version, yours.head) == (0, 0)
    assert await learning.operators.recipe("yours") == await learning.operators.recipe(POLICY)
    assert [version.n for version in await learning.operators.versions("mine")] == [0]
    assert (await learning.operators.status(POLICY)).head == 1
    with pytest.raises(StateConflict, match="already") as raised:
        await learning.operators.create_policy("mine", POLICY, None)
    assert (raised.value.code, raised.value.field) == ("policy_exists", "name")
    with pytest.raises(NotFound):
        await learning.operators.create_policy("other", "nobody", None)


async def test_a_retired_policy_learns_no_more_and_cannot_be_changed(learning: Learning) -> None:
    await learning.operators.create_policy("mine", POLICY, None)
    view = await learning.operators.retire_policy("mine")
    assert (view.state, view.reason) == (TrainingState.PAUSED, "paused: the policy is retired")
    assert (await learning.operators.status("mine")).unpublished is False
    for call in (
        learning.operators.retire_policy("mine"),
        learning.operators.resume("mine"),
        learning.operators.pause("mine", "why"),
        learning.operators.pin("mine", 0),
        learning.operators.set_recipe("mine", RECIPE),
        learning.operators.create_policy("yours", "mine", None),
    ):
        with pytest.raises(StateConflict) as raised:
            await call
        assert raised.value.code == "policy_retired"
    with pytest.raises(StateConflict) as needed:
        await learning.operators.retire_policy(POLICY if POLICY == "default" else "default")
    assert needed.value.code == "policy_needed"


async def test_a_retired_policys_keys_end_and_its_versions_leave_the_engines(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    keys = PostgresKeyStore(learning.database)
    await learning.operators.create_policy("mine", POLICY, None)
    _, secret = await keys.create_key("mine", {Scope.CHAT}, "mine")
    _, kept = await keys.create_key(POLICY, {Scope.CHAT}, "kept")
    for statement in (
        "INSERT INTO versions (policy, n, parent, path, sha256) VALUES ('mine', 1, 0, 'mine/v1', decode('ab', 'hex'))",
        "UPDATE policies SET head = 1, active = 1 WHERE id = 'mine'",
        "INSERT INTO engines (id, url) VALUES ('e', 'http://e')",
        "INSERT INTO engine_versions (engine_id, policy, version) VALUES ('e', 'mine', 1)",
    ):
        execute(learning.url, statement)
    wanted = [(version.policy, version.n) for version in await learning.publishing.wanted("e")]
    assert wanted == [("mine", 1)]
    await learning.operators.retire_policy("mine")
    assert await keys.authenticate(secret) is None
    assert await keys.authenticate(kept) is not None
    with pytest.raises(SetupError):
        await keys.create_key("mine", {Scope.CHAT}, "again")
    directory = await PostgresDirectoryStore(learning.database).read()
    assert [policy.id for policy in directory.policies] == [POLICY]
    assert await learning.publishing.wanted("e") == []
    unloadable = await learning.publishing.unloadable("e", timedelta(0))
    assert [(version.policy, version.n) for version in unloadable] == [("mine", 1)]


# A policy continues from its head with another recipe, or the recipe is rejected.


async def test_a_recipe_with_another_lora_than_the_heads_is_rejected(
    postgres_learning: PostgresLearning,
) -> None:
    database, learned = postgres_learning.database, recipe(lora={"rank": 8, "alpha": 16.0})
    await set_recipe(database, POLICY, learned)  # version 0 has no adapter, so any shape begins
    await step(postgres_learning, 1)
    for shape in ({"rank": 16, "alpha": 16.0}, {"rank": 8, "alpha": 32.0}):
        with pytest.raises(
            RecipeRejected, match=r"version 1 of policy 'default'.* has rank 8 and alpha 16: keep those"
        ):
            await set_recipe(database, POLICY, recipe(lora=shape))
    assert await read_recipe_of(database, POLICY) == learned
    await set_recipe(database, POLICY, recipe(lora={"rank": 8, "alpha": 16.0}, batch_samples=2))
    await postgres_learning.operators.roll_back(POLICY, 0)
    await set_recipe(database, POLICY, recipe(lora={"rank": 16, "alpha": 16.0}))


async def test_a_stored_recipe_that_became_invalid_is_reported_until_another_is_set(
    postgres_learning: PostgresLearning,
) -> None:
    await postgres_learning.add_samples(4)
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    await postgres_learning.execute(older)
    claim = await postgres_learning.steps.claim(POLICY, 1)
    assert claim.state is None
    assert "train.train_thinking" in claim.reason
    assert "clawloop recipe set" in claim.reason
    assert (await postgres_learning.steps.status(POLICY)).reason == claim.reason
    assert not await postgres_learning.work_waiting()
    await set_recipe(postgres_learning.database, POLICY, recipe(drift=0.5))
    assert (await postgres_learning.steps.claim(POLICY, 1)).samples == 4


async def test_another_recipe_can_be_set_after_a_step_by_a_recipe_that_became_invalid(
    postgres_learning: PostgresLearning,
) -> None:
    await step(postgres_learning, 1)
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    await postgres_learning.execute(older)
    with pytest.raises(StateConflict, match=r"train\.train_thinking.*clawloop recipe set") as refused:
        await postgres_learning.operators.recipe(POLICY)
    assert refused.value.code == "recipe_unusable"
    with pytest.raises(RecipeRejected, match="has rank 16 and alpha 32: keep those"):
        await set_recipe(postgres_learning.database, POLICY, recipe(lora={"rank": 8}))
    await set_recipe(postgres_learning.database, POLICY, recipe(drift=0.5))


async def test_a_hint_for_an_adapter_of_another_shape_is_dropped_and_the_verdict_trained(
    postgres_learning: PostgresLearning,
) -> None:
    await step(postgres_learning, 1)
    judged = await postgres_learning.add_samples(3, version=1, hinted=[1, 2])
    unjudged = await postgres_learning.add_samples(1, version=1, reward=None, hinted=[1, 2])
    plain = await postgres_learning.add_samples(1)
    await postgres_learning.operators.roll_back(POLICY, 0)
    await set_recipe(postgres_learning.database, POLICY, recipe(lora={"rank": 8, "alpha": 16.0}))
    await postgres_learning.steps.claim(POLICY, 2)
    batch = await postgres_learning.steps.batch(POLICY, 2)
    assert batch.teachers == {}
    assert [(one.sample_id, one.hinted_prompts) for one in batch.samples] == [
        (sample, {}) for sample in (*judged, *plain)
    ]
    shape = "version 1, which answered, has a LoRA of another shape"
    assert batch.without_hint == dict.fromkeys(judged, shape)
    assert (await postgres_learning.sample_result(*unjudged))[
        2
    ] == "version 1, which answered, is gone: its hint cannot be read"


# Publishing, in memory and in PostgreSQL.

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


# A policy begins from a version of another one, and shares its files, in memory and in PostgreSQL.

HOUR = timedelta(hours=1)


async def file_of(learning: Learning, engine: str, policy: str, n: int) -> str:
    """The directory that engines load a wanted version from."""
    (path,) = (one.path for one in await learning.publishing.wanted(engine) if (one.policy, one.n) == (policy, n))
    return path


async def test_a_policy_begins_from_a_version_and_answers_once_an_engine_has_it(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    batch = await step(learning, 1)
    await step(learning, 2)
    view = await learning.operators.create_policy("mine", POLICY, None, 1)
    assert (view.version, view.head, view.step, view.unpublished) == (0, 1, 2, True)
    base, first = await learning.operators.versions("mine")
    assert (base.n, base.origin, first.n, first.parent) == (0, None, 1, 0)
    assert (first.origin, first.state) == (VersionOrigin(POLICY, 1), "head")
    assert await file_of(learning, engine, "mine", 1) == trained(batch).version.path
    assert not await learning.publishing.activate("mine", 1, 0)  # no engine has it under this name
    await learning.publishing.loaded(engine, "mine", 1)
    assert await learning.publishing.activate("mine", 1, 0)
    assert (await learning.operators.status("mine")).unpublished is False
    assert (await learning.operators.status(POLICY)).head == 2


async def test_the_base_model_is_version_0_of_every_policy(learning: Learning) -> None:
    await step(learning, 1)
    view = await learning.operators.create_policy("mine", POLICY, None, 0)
    assert (view.head, view.unpublished) == (0, False)
    assert [version.n for version in await learning.operators.versions("mine")] == [0]


async def test_a_policy_begins_from_an_adapter_that_no_step_made(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    lora = Lora()
    brought = BroughtAdapter("mine/v1-0123456789ab", "ab" * 32, lora.rank, lora.alpha)
    view = await learning.operators.create_policy("mine", POLICY, None, 0, brought)
    assert (view.version, view.head, view.unpublished) == (0, 1, True)
    (_, first) = await learning.operators.versions("mine")
    assert (first.parent, first.origin, first.state) == (0, None, "head")
    assert await file_of(learning, engine, "mine", 1) == brought.path
    await learning.publishing.loaded(engine, "mine", 1)
    assert await learning.publishing.activate("mine", 1, 0)
    assert (await learning.operators.roll_back("mine", 0)).head == 0
    other = replace(brought, rank=lora.rank + 8)
    with pytest.raises(StateConflict, match="rank"):
        await learning.operators.create_policy("other", POLICY, None, 0, other)


def brought_adapter(rank: int = Lora().rank) -> BroughtAdapter:
    return BroughtAdapter("mine/v1-0123456789ab", "ab" * 32, rank, Lora().alpha)


async def test_training_goes_on_from_an_adapter_that_no_step_made(postgres_learning: PostgresLearning) -> None:
    mine, brought = postgres_learning, brought_adapter()
    engine = await mine.add_engine("http://e1:8100")
    zone = "UTC"
    await mine.operators.create_policy("mine", POLICY, scheduled(versions_a_day=1, time_zone=zone), 0, brought)
    await mine.publishing.loaded(engine, "mine", 1)
    assert await mine.publishing.activate("mine", 1, 0)
    await mine.add_samples(4, version=1, hinted=[1, 2])
    for table in ("sessions", "samples"):
        await mine.execute(f"UPDATE {table} SET policy = 'mine'")
    assert (await mine.steps.claim("mine", 2)).state is StepState.CLAIMED  # none was made today
    batch = await mine.steps.batch("mine", 2)
    assert batch.parent == VersionRef("mine", 1, 0, brought.path, brought.sha256)
    assert batch.without_hint == {}
    assert await mine.steps.commit(batch, trained(batch)) is StepState.CANDIDATE
    # Engines have to have both, so that the gate can compare them.
    assert {version.n for version in await mine.publishing.wanted(engine)} == {1, 2}
    assert (await mine.gate.accept("mine", 2))[0] is StepState.COMMITTED
    assert await violations(mine.database) == []
    assert [version.n for version in await committed_versions(mine.database)] == [1, 2]


async def test_a_rejected_first_step_leaves_the_adapter_that_was_brought(postgres_learning: PostgresLearning) -> None:
    mine = postgres_learning
    await mine.operators.create_policy("mine", POLICY, None, 0, brought_adapter())
    await mine.add_samples(4, version=1)
    for table in ("sessions", "samples"):
        await mine.execute(f"UPDATE {table} SET policy = 'mine'")
    await mine.steps.claim("mine", 2)
    batch = await mine.steps.batch("mine", 2)
    assert await mine.steps.commit(batch, trained(batch)) is StepState.CANDIDATE
    failed = GateCheck(NUMBERS, CheckResult.FAILED, "too far", {"parent_distance": 4.5})
    await mine.gate.record("mine", 2, failed)
    assert (await mine.gate.reject("mine", 2, "too far"))[0] is StepState.REJECTED
    assert (await mine.operators.status("mine")).head == 1
    base, brought, rejected = [version.state for version in await mine.operators.versions("mine")]
    assert (brought, rejected) == ("head", "rejected: too far"), base


async def test_the_adapter_that_was_brought_keeps_its_shape(postgres_learning: PostgresLearning) -> None:
    mine, other = postgres_learning, recipe(lora={"rank": 8})
    await mine.operators.create_policy("mine", POLICY, None, 0, brought_adapter())
    with pytest.raises(RecipeRejected, match=r"rank 8.* version 1 of policy 'mine'.* has rank 16"):
        await mine.operators.set_recipe("mine", other)
    with pytest.raises(StateConflict, match="has rank 16") as raised:
        await mine.operators.create_policy("yours", "mine", other, 1)
    assert raised.value.field == "version"
    await mine.operators.create_policy("yours", "mine", None, 1)

    async def others(policy: str, lora: Lora) -> frozenset[int]:
        return await mine.database.run(lambda it: versions_of_other_shape(it, policy, lora))

    for policy in ("mine", "yours"):
        assert list(await others(policy, Lora(rank=8))) == [1]
        assert not await others(policy, Lora())
    await mine.operators.roll_back("mine", 0)
    assert (await mine.operators.set_recipe("mine", other)).head == 0
    assert await violations(mine.database) == []


async def test_the_files_that_were_brought_are_known_until_nobody_needs_them(
    postgres_learning: PostgresLearning,
) -> None:
    mine, brought = postgres_learning, brought_adapter()
    directory = AdapterDirectory("mine", 1, brought.path)
    recovery = PostgresRecoveryStore(mine.database)
    await mine.operators.create_policy("mine", POLICY, None, 0, brought)
    # `clawloop recover` names no directory as lost whose version PostgreSQL has.
    assert ("mine", 1) in await recovery.known_steps({"mine"})
    await mine.age(2 * HOUR)
    assert await mine.publishing.removable(HOUR) == []
    assert await mine.publishing.leftover([directory]) == []
    await mine.operators.roll_back("mine", 0)
    assert [version.path for version in await mine.publishing.removable(HOUR)] == [brought.path]
    assert await mine.publishing.mark_removed("mine", 1, HOUR)
    assert await mine.publishing.leftover([directory]) == [directory]
    await mine.operators.retire_policy("mine")
    assert await violations(mine.database) == []


async def test_what_an_adapter_that_was_brought_said_can_be_erased(postgres_learning: PostgresLearning) -> None:
    mine = postgres_learning
    await mine.operators.create_policy("mine", POLICY, None, 0, brought_adapter())
    samples = await mine.add_samples(5, version=1)
    for table in ("sessions", "samples"):
        await mine.execute(f"UPDATE {table} SET policy = 'mine'")
    await mine.steps.claim("mine", 2)
    batch = await mine.steps.batch("mine", 2)
    await mine.steps.commit(batch, trained(batch))
    assert (await mine.gate.accept("mine", 2))[0] is StepState.COMMITTED
    erasures = PostgresErasureStore(mine.database)
    outcomes = []
    for sample in (samples[0], samples[-1]):
        [row] = await mine.rows(
            "SELECT t.session_id FROM samples s JOIN turns t ON t.id = s.turn_id WHERE s.id = %s", sample
        )
        erased = await erasures.erase_session(SessionId(row["session_id"]))
        assert erased is not None
        outcomes.append((erased.turns, erased.expired, erased.learned))
    assert outcomes == [(1, 0, 1), (1, 1, 0)]
    assert await violations(mine.database) == []


@pytest.mark.slow
async def test_the_command_begins_a_policy_from_an_adapter(
    postgres_learning: PostgresLearning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLAWLOOP_MODEL", raising=False)
    base, adapter = await asyncio.to_thread(base_and_adapter, tmp_path, "qwen3", tied=True, shard_size="1GB")
    learned_by, other = tmp_path / "mine.toml", tmp_path / "other.toml"
    learned_by.write_text('name = "mine"\n[train.lora]\nrank = 4\nalpha = 8.0\n')
    other.write_text('name = "other"\n[train.lora]\nrank = 8\nalpha = 8.0\n')
    data = tmp_path / "data"
    settings = {"DATABASE_URL": postgres_learning.url, "CLAWLOOP_DATA": str(data)}
    begun = ("policy", "create", "mine", "--adapter", str(adapter))

    async def run(*more: str) -> Done:
        return await asyncio.to_thread(clawloop, *begun, *more, **settings)

    def kept() -> list[Path]:
        return list((data / "adapters").glob("*/v1-*"))

    assert "give --model MODEL" in refusal(await run("--recipe", str(learned_by)))
    model = ("--model", str(base))
    assert "take a recipe with those of the adapter" in refusal(await run(*model, "--recipe", str(other)))
    assert kept() == []  # what no policy begins from is not left behind
    assert "--adapter and --version" in refusal(await run(*model, "--version", "1"))
    made = await run(*model, "--recipe", str(learned_by), "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["head"] == 1
    [written] = kept()
    [version] = await committed_versions(postgres_learning.database)
    check_version(data / "adapters" / version.path, version.sha256)
    assert data / "adapters" / version.path == written
    # A second one of this name leaves the first as it is.
    assert "There is a policy 'mine' already" in refusal(await run(*model, "--recipe", str(learned_by)))
    assert kept() == [written]


async def test_a_version_that_was_begun_from_itself_leads_to_the_step_that_made_it(learning: Learning) -> None:
    await step(learning, 1)
    await step(learning, 2)
    await learning.operators.create_policy("mine", POLICY, None, 2)
    await learning.operators.create_policy("yours", "mine", None, 1)
    (_, first) = await learning.operators.versions("yours")
    assert first.origin == VersionOrigin(POLICY, 2)


async def test_what_no_policy_can_begin_from_makes_none(learning: Learning) -> None:
    await step(learning, 1)
    await step(learning, 2)
    await reject(learning, 3)
    await learning.add_samples(4, version=2)
    await learning.steps.claim(POLICY, 4)
    batch = await learning.steps.batch(POLICY, 4)
    assert await learning.steps.commit(batch, trained(batch)) is StepState.CANDIDATE
    await learning.lose_files(1)
    other_shape = recipe(lora={"rank": 8})
    for version, learned_by, code in (
        (1, None, "version_removed"),
        (3, None, "version_not_accepted"),
        (4, None, "version_not_accepted"),
        (2, other_shape, "recipe_conflict"),
    ):
        with pytest.raises(StateConflict) as raised:
            await learning.operators.create_policy("mine", POLICY, learned_by, version)
        assert (raised.value.code, raised.value.field) == (code, "version")
    with pytest.raises(NotFound) as unknown:
        await learning.operators.create_policy("mine", POLICY, None, 9)
    assert (unknown.value.code, unknown.value.field) == ("version_not_found", "version")
    with pytest.raises(NotFound) as nobody:
        await learning.operators.create_policy("mine", "nobody", None, 2)
    assert nobody.value.code == "policy_not_found"
    with pytest.raises(NotFound):
        await learning.operators.status("mine")
    assert (await learning.operators.create_policy("mine", POLICY, other_shape, 0)).head == 0


async def test_shared_files_stay_until_the_last_policy_needs_them_no_more(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    path = trained(await step(learning, 1)).version.path
    await learning.operators.create_policy("mine", POLICY, None, 1)
    for n in range(2, 7):
        await step(learning, n)
    await publish(learning, 6, engine)
    await learning.age(2 * HOUR)
    directory = AdapterDirectory(POLICY, 1, path)
    assert await learning.publishing.mark_removed(POLICY, 1, HOUR)
    assert await learning.publishing.has_files_at(path)
    assert await learning.publishing.leftover([directory]) == []
    assert await file_of(learning, engine, "mine", 1) == path
    assert not await learning.publishing.mark_removed("mine", 1, HOUR)
    await learning.operators.roll_back("mine", 0)
    assert await learning.publishing.mark_removed("mine", 1, HOUR)
    assert not await learning.publishing.has_files_at(path)
    assert await learning.publishing.leftover([directory]) == [directory]


async def test_training_goes_on_from_the_shared_files(postgres_learning: PostgresLearning) -> None:
    made = trained(await step(postgres_learning, 1)).version
    await postgres_learning.operators.create_policy("mine", POLICY, None, 1)
    mine = postgres_learning
    await mine.add_samples(4, version=1, hinted=[1, 2])
    for table in ("sessions", "samples"):
        await mine.execute(
            f"UPDATE {table} SET policy = 'mine' WHERE id IN (SELECT id FROM {table} ORDER BY id DESC LIMIT 4)"
        )
    assert (await mine.steps.claim("mine", 2)).state is StepState.CLAIMED
    batch = await mine.steps.batch("mine", 2)
    assert batch.parent == VersionRef("mine", 1, 0, made.path, made.sha256)
    assert await mine.steps.commit(batch, trained(batch)) is StepState.CANDIDATE
    assert (await mine.gate.accept("mine", 2))[0] is StepState.COMMITTED
    with pytest.raises(RecipeRejected, match="has rank 16"):
        await mine.operators.set_recipe("mine", recipe(lora={"rank": 8}))
    await mine.operators.roll_back("mine", 1)
    with pytest.raises(RecipeRejected, match="has rank 16"):
        await mine.operators.set_recipe("mine", recipe(lora={"rank": 8}))
    events = await PostgresTrainingBrowser(mine.database).events("mine", 9)
    [created] = [each for each in events if each.kind == "created"]
    assert (created.detail["like"], created.detail["version"]) == (POLICY, 1)


async def test_a_sweep_publishes_it_if_the_signal_was_lost(postgres_learning: PostgresLearning) -> None:
    await step(postgres_learning, 1)
    await postgres_learning.operators.create_policy("mine", POLICY, None, 1)
    assert "mine" in await PostgresWorkStore(postgres_learning.database).pending_work(timedelta(minutes=1))


async def test_hints_of_versions_with_another_shape_are_known_by_the_step_that_made_them(
    postgres_learning: PostgresLearning,
) -> None:
    await step(postgres_learning, 1)
    await postgres_learning.operators.create_policy("mine", POLICY, None, 1)

    async def others(lora: Lora) -> frozenset[int]:
        return await postgres_learning.database.run(lambda it: versions_of_other_shape(it, "mine", lora))

    assert await others(Lora()) == frozenset()
    assert await others(Lora(rank=8)) == {1}
