"""Operators' views and changes of training, in memory and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import SampleState, StepState, TrainingState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound, SetupError, StateConflict
from clawloop.core.recipes.recipe import Recipe
from db.serving.directory import PostgresDirectoryStore
from db.serving.keys import PostgresKeyStore
from tests.conftest import execute
from tests.contract.learning import POLICY, RECIPE, Learning, PostgresLearning, publish, recipe, step


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
