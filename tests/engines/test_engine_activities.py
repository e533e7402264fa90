"""An engine's activities: its rows match its adapters, and it gets the versions it should have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from activities.serving.engines import EngineActivities, EngineLoad
from clawloop.core.adapters.directory import HASHED_FILES, adapter_sha256
from clawloop.core.errors import EngineUnavailable
from clawloop.training.adapters.files import write_version
from db.serving.directory import ensure_policy
from tests.conftest import execute
from tests.engines.conftest import ENGINE, Shelf
from tests.fakes.engine_control import FakeEngineControl


async def test_missing_versions_are_loaded_once_oldest_first(shelf: Shelf) -> None:
    await shelf.publish(1)
    shelf.commit(2, 3)
    execute(shelf.url, "UPDATE policies SET pinned = 2")
    has = await shelf.load()
    assert shelf.control.loads == ["default-v1", "default-v2", "default-v3"]
    assert shelf.rows() == has.versions == ["default-v1", "default-v2", "default-v3"]
    assert (await shelf.load()).missing == []
    assert len(shelf.control.loads) == 3


async def test_versions_older_than_the_head_are_not_loaded(shelf: Shelf) -> None:
    shelf.commit(1, 2, 3)
    await shelf.load()
    assert shelf.control.loads == ["default-v3"]


async def test_a_rejected_version_gets_no_row_and_others_do(shelf: Shelf) -> None:
    await shelf.publish(1)
    shelf.commit(2)
    shelf.control.refuses["default-v2"] = "rank 64 is greater than max_lora_rank 16"
    has = await shelf.load()
    assert (has.versions, has.missing) == (["default-v1"], ["default-v2"])
    assert has.problem == "default-v2: rank 64 is greater than max_lora_rank 16"
    assert shelf.one("SELECT problem FROM engines") == has.problem

    shelf.control.refuses.clear()  # it catches up
    has = await shelf.load()
    assert (has.versions, has.problem) == (["default-v1", "default-v2"], "")
    assert shelf.one("SELECT problem FROM engines") is None


async def test_a_version_whose_disk_is_gone_gets_no_row_until_the_disk_is_back(shelf: Shelf, tmp_path: Path) -> None:
    written = write_version(tmp_path / "default", 1, dict.fromkeys(HASHED_FILES, b'{"r": 4}'))
    shelf.commit(1)
    sha256 = adapter_sha256(written.path)
    execute(shelf.url, f"UPDATE versions SET path = 'default/{written.path.name}', sha256 = '\\x{sha256}' WHERE n = 1")
    gone = (tmp_path / "default").rename(tmp_path / "gone")
    control = FakeEngineControl(tmp_path)
    activities = EngineActivities(shelf.store, control, check_seconds=0.02, routed_seconds=0.01)
    has = await activities.load_versions(EngineLoad(engine_id=ENGINE))
    assert (has.versions, has.missing) == ([], ["default-v1"])
    assert "cannot be read: No such file" in has.problem

    gone.rename(tmp_path / "default")
    has = await activities.load_versions(EngineLoad(engine_id=ENGINE))
    assert (has.versions, has.problem) == (["default-v1"], "")


async def test_an_unreachable_engine_raises_for_a_retry_and_gets_no_row(shelf: Shelf) -> None:
    shelf.commit(1)
    shelf.control.alive = False
    with pytest.raises(EngineUnavailable):
        await shelf.load()
    assert shelf.rows() == []


async def test_a_load_waits_while_too_many_versions_have_requests(shelf: Shelf) -> None:
    for n in (1, 2, 3):
        await shelf.publish(n)
    shelf.control.busy = {"default-v1", "default-v2", "default-v3", "default-v0"}
    shelf.commit(4)
    waiting = asyncio.create_task(shelf.load())
    await asyncio.sleep(0.5)
    assert not waiting.done()
    shelf.commit(5)  # newer by the time there is a free slot
    shelf.control.busy = {"default-v1", "default-v2"}
    async with asyncio.timeout(30):
        await waiting
    assert shelf.control.loads[-1] == "default-v5"
    assert "default-v4" not in shelf.control.loads


async def test_busy_versions_of_other_policies_do_not_block_a_load(shelf: Shelf) -> None:
    for policy in ("ann", "ben", "cem", "dia"):
        await ensure_policy(shelf.database, policy, "tiny", [])
        execute(shelf.url, f"INSERT INTO versions (policy, n) VALUES ('{policy}', 0) ON CONFLICT DO NOTHING")
        shelf.commit(1, policy=policy)
    async with asyncio.timeout(30):
        await shelf.load()
    shelf.control.busy = {"ann-v1", "ben-v1", "cem-v1", "dia-v1"}
    shelf.commit(2, policy="ann")
    async with asyncio.timeout(30):
        await shelf.load()
    assert shelf.control.loads[-1] == "ann-v2"


async def test_a_policy_that_waits_for_a_slot_does_not_hold_up_another(shelf: Shelf) -> None:
    for policy in ("ann", "ben"):
        await ensure_policy(shelf.database, policy, "tiny", [])
        execute(shelf.url, f"INSERT INTO versions (policy, n) VALUES ('{policy}', 0) ON CONFLICT DO NOTHING")
    for n in (1, 2):
        shelf.commit(n, policy="ann")
        await shelf.load()
    shelf.control.busy = {"ann-v0", "ann-v1", "ann-v2", "ann-v3"}
    shelf.commit(3, policy="ann")
    shelf.commit(1, policy="ben")
    waiting = asyncio.create_task(shelf.load())
    async with asyncio.timeout(30):
        while shelf.control.loads[-1:] != ["ben-v1"]:
            await asyncio.sleep(0.05)
    assert not waiting.done()
    assert "ann-v3" not in shelf.control.loads
    shelf.control.busy.clear()
    async with asyncio.timeout(30):
        await waiting
    assert shelf.control.loads[-1] == "ann-v3"


async def test_old_versions_are_unloaded_a_minute_after_another_took_their_place(shelf: Shelf) -> None:
    for n in (1, 2, 3, 4):
        await shelf.publish(n)
    assert (await shelf.watch()).leaving == []
    shelf.age(61)
    shelf.control.busy = {"default-v2"}
    has = await shelf.watch()
    assert has.leaving == ["default-v1", "default-v3"]
    has = await shelf.unload()
    assert shelf.control.listed == {"default-v2", "default-v4"}
    assert has.versions == shelf.rows() == ["default-v4"]  # no new requests go to v2, running ones go on

    shelf.control.busy.clear()
    assert (await shelf.watch(has)).leaving == ["default-v2"]
    await shelf.unload()
    assert shelf.control.listed == {"default-v4"}


async def test_pinned_and_active_versions_are_never_unloaded(shelf: Shelf) -> None:
    for n in (1, 2, 3):
        await shelf.publish(n)
    execute(shelf.url, "UPDATE policies SET pinned = 1")
    shelf.age(10_000)
    await shelf.unload()
    assert shelf.control.listed == {"default-v1", "default-v3"}


async def test_a_version_wanted_again_before_its_unload_stays(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 2):
        await shelf.publish(n)
    shelf.age(61)
    waited: list[float] = []

    async def meanwhile(seconds: float) -> None:
        execute(shelf.url, "UPDATE policies SET pinned = 1")
        waited.append(seconds)

    monkeypatch.setattr("activities.serving.engines.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": meanwhile}))
    has = await shelf.unload()
    monkeypatch.undo()
    assert waited == [shelf.activities._routed_seconds]
    assert shelf.control.listed == {"default-v1", "default-v2"}
    assert has.missing == ["default-v1"]
    assert (await shelf.load()).versions == ["default-v1", "default-v2"]


async def test_an_engine_that_dies_loses_its_rows_and_a_restarted_one_is_refilled(shelf: Shelf) -> None:
    await shelf.publish(1)
    seen = await shelf.watch()
    assert seen.healthy
    watching = asyncio.create_task(shelf.watch(seen))
    await asyncio.sleep(0.1)
    assert not watching.done()

    shelf.control.alive = False
    async with asyncio.timeout(30):
        dead = await watching
    assert (dead.healthy, dead.problem) == (False, "does not answer")
    assert shelf.rows() == []
    assert shelf.one("SELECT problem FROM engines") == "does not answer"

    shelf.control.restart()
    async with asyncio.timeout(30):
        up = await shelf.watch(dead)
    assert (up.healthy, up.missing, up.versions) == (True, ["default-v1"], [])
    assert (await shelf.load()).versions == shelf.rows() == ["default-v1"]
    assert shelf.one("SELECT problem FROM engines") is None


async def test_an_engine_that_is_away_is_asked_more_often(shelf: Shelf) -> None:
    await shelf.publish(1)
    shelf.control.alive = False
    dead = await shelf.watch()
    shelf.activities = EngineActivities(shelf.store, shelf.control, check_seconds=600, away_check_seconds=0.02)
    watching = asyncio.create_task(shelf.watch(dead))
    await asyncio.sleep(0.1)
    assert not watching.done()

    shelf.control.alive = True
    async with asyncio.timeout(30):
        assert (await watching).healthy


async def test_an_unseen_restart_is_found_by_the_adapters_listed(shelf: Shelf) -> None:
    await shelf.publish(1)
    seen = await shelf.watch()
    shelf.control.restart()
    async with asyncio.timeout(30):
        has = await shelf.watch(seen)
    assert (has.versions, has.missing, shelf.rows()) == ([], ["default-v1"], [])


async def test_a_lost_adapter_is_loaded_again(shelf: Shelf) -> None:
    await shelf.publish(1)
    await shelf.publish(2)
    shelf.control.listed.remove("default-v2")
    assert (await shelf.load()).versions == ["default-v1", "default-v2"]


async def test_an_adapter_without_a_row_gets_one_or_is_unloaded(shelf: Shelf) -> None:
    shelf.commit(1)
    await shelf.publish(2)
    shelf.control.listed |= {"default-v1", "by-hand", "other-v7"}
    assert (await shelf.watch()).leaving == ["default-v1"]
    await shelf.unload()
    assert shelf.control.listed == {"default-v2", "by-hand", "other-v7"}


async def test_a_silent_engine_keeps_its_rows_for_a_while(shelf: Shelf) -> None:
    await shelf.publish(1)
    seen = await shelf.watch()
    shelf.control.silent = True
    for _ in range(4):
        await shelf.activities._check(ENGINE, report=False)
    assert shelf.rows() == ["default-v1"]
    async with asyncio.timeout(30):
        has = await shelf.watch(seen)
    assert (has.healthy, has.problem, shelf.rows()) == (False, "silent for a minute", [])


async def test_a_watch_does_not_report_what_a_load_reported(shelf: Shelf) -> None:
    await shelf.publish(1)
    watching = asyncio.create_task(shelf.watch(await shelf.watch()))
    await asyncio.sleep(0.05)
    shelf.commit(2)
    await shelf.load()
    await asyncio.sleep(0.2)
    # It may have seen that v2 was missing before the load began, but does not report what the load changed.
    if watching.done():
        assert watching.result().missing == ["default-v2"]
    watching.cancel()
    await asyncio.wait([watching])


async def test_an_unknown_engine_is_reported_with_the_remedy(shelf: Shelf) -> None:
    execute(shelf.url, "DELETE FROM engines")
    has = await shelf.watch()
    assert (has.healthy, has.problem) == (False, "not among the engines: clawloop engine add")
