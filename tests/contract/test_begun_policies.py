"""A policy begins from a version of another one, and shares its files, in memory and in PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from clawloop.core.adapters.directory import check_version
from clawloop.core.contracts.adapter_directory import AdapterDirectory
from clawloop.core.contracts.training import (
    BroughtAdapter,
    CheckResult,
    GateCheck,
    StepState,
    VersionOrigin,
    VersionRef,
)
from clawloop.core.errors import NotFound, RecipeRejected, StateConflict
from clawloop.core.ids import SessionId
from clawloop.core.recipes.recipe import Lora
from db.erasure import PostgresErasureStore
from db.invariants import committed_versions, violations
from db.recovery import PostgresRecoveryStore
from db.training.policies import versions_of_other_shape
from db.training.status import PostgresTrainingBrowser
from db.training.work_flag import PostgresWorkStore
from tests.contract.learning import POLICY, Learning, PostgresLearning, publish, recipe, reject, step, trained
from tests.contract.test_schedule import scheduled
from tests.training.test_merge import base_and_adapter
from tests.verbs import Done, clawloop, refusal

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
    failed = GateCheck("numbers", CheckResult.FAILED, "too far", {"parent_distance": 4.5})
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
        assert (await others(policy, Lora(rank=8)), await others(policy, Lora())) == ({1}, frozenset())
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
