"""An engine's activities: rows match adapters; publishing, retention, control."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from activities.serving.engines import EngineActivities, EngineLoad
from activities.serving.publishing import PublishingActivities, PublishVersion
from activities.serving.retention import Retention
from clawloop.core.adapters.directory import HASHED_FILES, AdapterFolder, adapter_sha256
from clawloop.core.contracts.notices import Notice, VersionToLoad
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import AdapterUnusable, EngineRejected, EngineUnavailable, RecordUnusable, SignalFailed
from clawloop.core.recipes.recipe import Recipe, Train
from clawloop.serving.adapters import VllmControl
from clawloop.training.adapters.files import write_version
from db.serving.directory import ensure_policy
from db.serving.engines import add_engine, drain_engine
from db.serving.publishing import PostgresPublishingStore
from db.training.operators import PostgresTrainingStore
from db.training.steps import PostgresStepStore
from tests.conftest import execute
from tests.engines.conftest import ENGINE, Shelf
from tests.fakes.engine import serving
from tests.fakes.engine_control import FakeEngineControl

# An engine's activities: its rows match its adapters, and it gets the versions it should have.


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


# What an engine says that it loaded and runs is checked: what is not the version is unloaded, old figures renewed.

NAME = "default-v1"


class Loader:
    """Loads adapters as vLLM does, and something else if it is told to."""

    def __init__(self, while_loading: Callable[[str], str]) -> None:
        self.loaded: dict[str, str] = {}
        self.probes = 0
        self._while_loading = while_loading

    async def models(self, _: Request) -> JSONResponse:
        return JSONResponse(
            {"data": [{"id": name, "root": root, "parent": "tiny"} for name, root in self.loaded.items()]}
        )

    async def load(self, request: Request) -> JSONResponse:
        asked: dict[str, Any] = await request.json()
        self.loaded[asked["lora_name"]] = self._while_loading(asked["lora_path"])
        return JSONResponse({})

    async def unload(self, request: Request) -> JSONResponse:
        del self.loaded[(await request.json())["lora_name"]]
        return JSONResponse({})

    async def probe(self, _: Request) -> JSONResponse:
        self.probes += 1
        return JSONResponse({})

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
                Route("/v1/completions", self.probe, methods=["POST"]),
            ]
        )


class LoadedBefore(Loader):
    """Refuses a load as vLLM does after waiting for another one of the same name."""

    async def load(self, request: Request) -> JSONResponse:
        await super().load(request)
        return JSONResponse({"error": {"message": "has already been loaded"}}, 400)


def _changed(path: str) -> str:
    (Path(path) / HASHED_FILES[0]).write_bytes(b"other weights")
    return path


@pytest.mark.parametrize(
    ("while_loading", "error"),
    [
        (lambda path: path, None),
        (lambda _: "/elsewhere", EngineRejected),  # the name stands for another folder
        (_changed, AdapterUnusable),  # the files changed while they were read
    ],
)
async def test_what_was_loaded_is_the_version_or_is_unloaded_unused(
    tmp_path: Path, while_loading: Callable[[str], str], error: type[Exception] | None
) -> None:
    written = write_version(tmp_path / "default", 1, dict.fromkeys(HASHED_FILES, b"x"))
    path = str(written.path.relative_to(tmp_path))
    version = VersionRef(policy="default", n=1, parent=0, path=path, sha256=adapter_sha256(written.path))
    loader = Loader(while_loading)
    async with serving(loader.app) as url, VllmControl(url, tmp_path) as control:
        if error is None:
            await control.load(version, NAME)
        else:
            with pytest.raises(error):
                await control.load(version, NAME)
    assert loader.loaded == ({} if error else {NAME: str(written.path)})
    assert loader.probes == (0 if error else 1)


async def test_a_load_that_an_earlier_attempt_began_and_that_ends_first_is_no_refusal(tmp_path: Path) -> None:
    written = write_version(tmp_path / "default", 1, dict.fromkeys(HASHED_FILES, b"x"))
    path = str(written.path.relative_to(tmp_path))
    version = VersionRef(policy="default", n=1, parent=0, path=path, sha256=adapter_sha256(written.path))
    loader = LoadedBefore(lambda path: path)
    async with serving(loader.app) as url, VllmControl(url, tmp_path) as control:
        await control.load(version, NAME)
    assert loader.loaded == {NAME: str(written.path)}
    assert loader.probes == 1


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_an_engine_that_cannot_answer_now_is_asked_again(tmp_path: Path, status: int) -> None:
    async def fails(_: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": "its core ended"}}, status)

    paths = ("/v1/models", "/metrics", "/v1/unload_lora_adapter")
    routes = [Route(path, fails, methods=["GET", "POST"]) for path in paths]
    async with serving(Starlette(routes=routes)) as url, VllmControl(url, tmp_path) as control:
        for asked in (control.names(), control.running(), control.slots(), control.unload(NAME)):
            with pytest.raises(EngineUnavailable, match=str(status)):
                await asked


HOUR = 3600.0


@pytest.mark.parametrize("asked_since", [True, False])
async def test_after_the_clock_was_set_back_the_adapters_that_run_now_are_found(
    tmp_path: Path, asked_since: bool
) -> None:
    """vLLM keeps a series for each set of adapters that it ran; those from before the jump seem newest for an hour."""
    before = f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{NAME}",waiting_lora_adapters=""}}'
    now = before.replace(NAME, "default-v2")
    updated: list[float] = [time.time()] if asked_since else []

    async def metrics(_: Request) -> PlainTextResponse:
        lines = [f"{before} {time.time() + HOUR}", *(f"{now} {at}" for at in updated)]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny", "root": "tiny", "parent": None}]})

    async def probe(_: Request) -> JSONResponse:
        updated.append(time.time())
        return JSONResponse({})

    routes = [
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/completions", probe, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes)) as url, VllmControl(url, tmp_path) as control:
        assert await control.running() == {"default-v2"}
        assert await control.slots() == 4


# A version is activated once all engines in rotation have it, or some when the wait is over.

ASK = PublishVersion(policy="default")


class LoadingNotifier:
    """Loads when notified, as an engine's agent does."""

    def __init__(self, shelf: Shelf, *, available: bool = True, loads: bool = True) -> None:
        self.notified: list[str] = []
        self._shelf = shelf
        self._available = available
        self._loads = loads

    async def notify(self, notice: Notice) -> None:
        assert isinstance(notice, VersionToLoad)
        self.notified.append(notice.engine_id)
        if not self._available:
            raise SignalFailed("Temporal: away")
        if self._loads:
            self._shelf.tasks.add(asyncio.create_task(self._shelf.load()))


def publisher(shelf: Shelf, notifier: LoadingNotifier, wait_seconds: float = 60) -> PublishingActivities:
    return PublishingActivities(shelf.store, PostgresStepStore(shelf.database), notifier, wait_seconds=wait_seconds)


async def test_the_newest_version_is_activated_once_the_engine_has_it(shelf: Shelf) -> None:
    shelf.commit(1, 2)
    notifier = LoadingNotifier(shelf)
    done = await publisher(shelf, notifier).publish_version(ASK)
    assert (done.head, done.version, done.engines, done.missing, done.reason) == (2, 2, 1, 0, "")
    assert done.waited_seconds is not None
    assert done.waited_seconds < 60  # it ended when the engine had it
    assert notifier.notified == [ENGINE]
    assert shelf.one("SELECT active FROM policies") == 2
    again = await publisher(shelf, notifier).publish_version(ASK)
    assert (again.version, len(notifier.notified)) == (2, 1)


async def test_a_slow_engine_is_not_waited_for_beyond_the_limit(shelf: Shelf) -> None:
    await add_engine(shelf.database, "http://slow:8100")
    shelf.commit(1)
    await shelf.load()
    done = await publisher(shelf, LoadingNotifier(shelf, loads=False), wait_seconds=0.6).publish_version(ASK)
    assert (done.version, done.engines, done.missing) == (1, 1, 1)
    assert done.waited_seconds is not None
    assert done.waited_seconds > 0.6


async def test_drained_engines_and_those_with_a_problem_are_not_waited_for(shelf: Shelf) -> None:
    for name in ("drained:1", "ill:1"):
        await add_engine(shelf.database, f"http://{name}")
    await drain_engine(shelf.database, "drained:1")
    await shelf.store.report("ill:1", "does not answer")
    shelf.commit(1)
    notifier = LoadingNotifier(shelf)
    async with asyncio.timeout(30):
        done = await publisher(shelf, notifier, wait_seconds=600).publish_version(ASK)
    assert (done.engines, done.missing) == (1, 1)
    assert notifier.notified == [ENGINE, "ill:1"]


async def test_a_version_whose_files_are_damaged_can_be_left_for_another(shelf: Shelf) -> None:
    shelf.commit(1)
    await publisher(shelf, LoadingNotifier(shelf)).publish_version(ASK)
    shelf.commit(2)
    shelf.control.restart()
    shelf.control.refuses["default-v1"] = "it holds 0123, expected 4567"
    await shelf.load()
    assert "default-v1: it holds 0123" in shelf.one("SELECT problem FROM engines")
    done = await publisher(shelf, LoadingNotifier(shelf), wait_seconds=0.6).publish_version(ASK)
    assert (done.version, done.engines) == (2, 1)


async def test_while_no_engine_has_it_the_old_version_stays_active(shelf: Shelf) -> None:
    shelf.commit(1)
    with pytest.raises(EngineUnavailable, match="no engine has version 1"):
        await publisher(shelf, LoadingNotifier(shelf, loads=False), wait_seconds=0.3).publish_version(ASK)
    assert shelf.one("SELECT active FROM policies") == 0


async def test_a_failed_signal_does_not_stop_publishing(shelf: Shelf) -> None:
    shelf.commit(1)
    publishing = asyncio.create_task(publisher(shelf, LoadingNotifier(shelf, available=False)).publish_version(ASK))
    await asyncio.sleep(0.1)
    await shelf.load()
    assert (await publishing).version == 1


async def test_a_version_committed_meanwhile_is_published_instead(shelf: Shelf) -> None:
    shelf.commit(1)
    publishing = asyncio.create_task(publisher(shelf, LoadingNotifier(shelf, loads=False)).publish_version(ASK))
    await asyncio.sleep(0.1)
    shelf.commit(2)
    await shelf.load()
    done = await publishing
    assert (done.head, done.version) == (2, 2)
    assert shelf.control.loads == ["default-v2"]


async def test_a_pinned_version_is_activated_instead_of_a_newer_one(shelf: Shelf) -> None:
    shelf.commit(1, 2)
    execute(shelf.url, "UPDATE policies SET pinned = 1")
    done = await publisher(shelf, LoadingNotifier(shelf)).publish_version(ASK)
    assert (done.head, done.version, done.reason) == (2, 1, "version 1 is pinned")
    assert shelf.one("SELECT active FROM policies") == 1


async def test_an_unknown_policy_raises_at_once(shelf: Shelf) -> None:
    with pytest.raises(RecordUnusable):
        await publisher(shelf, LoadingNotifier(shelf)).publish_version(PublishVersion(policy="nobody"))


# Unneeded adapters are deleted; those an engine has or a step may start from stay.

HOURS = 2 * 3600.0


def on_disk(adapters: Path, *numbers: int) -> None:
    for n in numbers:
        folder = adapters / "default" / f"v{n}-0123456789ab"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")


def left(adapters: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (adapters / "default").iterdir())


async def test_old_versions_that_no_engine_has_are_removed_once(shelf: Shelf, tmp_path: Path) -> None:
    on_disk(tmp_path, 1, 2, 3, 4, 5, 6)
    for n in range(1, 7):
        await shelf.publish(n)
    retention = Retention(shelf.store, AdapterFolder(tmp_path))
    assert await retention.remove() == 0
    shelf.age(HOURS)
    assert await retention.remove() == 0  # the engine has them all
    await shelf.unload()
    assert await retention.remove() == 3
    assert left(tmp_path) == ["v4", "v5", "v6"]  # the newest on the path stay for a roll-back
    assert await retention.remove() == 0


class FillingFolder(AdapterFolder):
    """On a disk that has a GiB left."""

    async def free_bytes(self) -> int:
        return 2**30


@pytest.mark.parametrize(("wanted", "removed"), [(2**30, 0), (2**30 + 1, 3)])
async def test_on_a_disk_that_fills_versions_are_removed_after_minutes(
    wanted: int, removed: int, shelf: Shelf, tmp_path: Path
) -> None:
    on_disk(tmp_path, 1, 2, 3, 4, 5, 6)
    for n in range(1, 7):
        await shelf.publish(n)
    retention = Retention(shelf.store, FillingFolder(tmp_path), wanted_free=wanted)
    assert await retention.remove() == 0
    shelf.age(6 * 60.0)
    assert await retention.remove() == 0  # the engine has them all
    await shelf.unload()
    assert await retention.remove() == removed


class RolledBackMeanwhile(PostgresPublishingStore):
    """An operator rolls back to a version after it was found removable and before it is removed."""

    async def removable(self, age: timedelta) -> list[VersionRef]:
        found = await super().removable(age)
        await PostgresTrainingStore(self._database).roll_back("default", 2)
        return found


async def test_a_version_rolled_back_to_meanwhile_keeps_its_files(shelf: Shelf, tmp_path: Path) -> None:
    on_disk(tmp_path, 1, 2, 3, 4, 5, 6)
    for n in range(1, 7):
        await shelf.publish(n)
    shelf.age(HOURS)
    await shelf.unload()
    retention = Retention(RolledBackMeanwhile(shelf.database), AdapterFolder(tmp_path))
    assert await retention.remove() == 1
    assert left(tmp_path) == ["v1", "v2", "v4", "v5", "v6"]
    assert shelf.one("SELECT array_agg(n) FROM versions WHERE removed_at IS NOT NULL") == [3]


class CrashingFolder(AdapterFolder):
    """The machine goes down before anything is deleted."""

    async def remove(self, path: str) -> bool:
        raise ConnectionAbortedError(path)


@pytest.mark.parametrize("begun", [False, True], ids=["marked", "half deleted"])
async def test_a_crash_after_the_mark_leaves_what_the_next_sweep_deletes(
    begun: bool, shelf: Shelf, tmp_path: Path
) -> None:
    on_disk(tmp_path, 1, 2, 3, 4)
    execute(shelf.url, "INSERT INTO recipes VALUES ('r', 'r', 's', 't', '{}')")
    for n in range(1, 5):
        await shelf.publish(n)
        execute(
            shelf.url,
            "INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash, finished_at) "
            f"VALUES ('default', {n}, {n - 1}, 0, 'committed', 'r', now())",
        )
    shelf.age(HOURS)
    await shelf.unload()
    with pytest.raises(ConnectionAbortedError):
        await Retention(shelf.store, CrashingFolder(tmp_path)).remove()
    assert shelf.one("SELECT array_agg(n) FROM versions WHERE removed_at IS NOT NULL") == [1]
    assert left(tmp_path) == ["v1", "v2", "v3", "v4"]
    if begun:
        folder = tmp_path / "default"
        (folder / "v1-0123456789ab").rename(folder / ".removing-v1-0123456789ab")
    assert await Retention(shelf.store, AdapterFolder(tmp_path)).remove() == 1
    assert left(tmp_path) == ["v2", "v3", "v4"]


async def test_without_the_adapters_folder_no_version_is_marked_removed(shelf: Shelf, tmp_path: Path) -> None:
    for n in range(1, 6):
        await shelf.publish(n)
    shelf.age(HOURS)
    await shelf.unload()
    assert await Retention(shelf.store, AdapterFolder(tmp_path / "elsewhere")).remove() == 0
    assert shelf.one("SELECT count(*) FROM versions WHERE removed_at IS NOT NULL") == 0


@pytest.mark.parametrize("path", ["../outside/v1-0", "default", ".", "/etc"])
async def test_only_a_versions_directory_is_ever_deleted(path: str, tmp_path: Path) -> None:
    on_disk(tmp_path / "adapters", 1)
    (tmp_path / "outside" / "v1-0").mkdir(parents=True)
    with pytest.raises(AdapterUnusable, match="not a version"):
        await AdapterFolder(tmp_path / "adapters").remove(path)
    assert (tmp_path / "outside" / "v1-0").is_dir()
    assert left(tmp_path / "adapters") == ["v1"]


async def test_an_interrupted_removal_is_finished(tmp_path: Path) -> None:
    on_disk(tmp_path, 1)
    folder = tmp_path / "default"
    (folder / "v1-0123456789ab").rename(folder / ".removing-v1-0123456789ab")
    assert await AdapterFolder(tmp_path).remove("default/v1-0123456789ab")
    assert list(folder.iterdir()) == []


async def test_directories_of_failed_attempts_are_deleted_once_the_step_is_over(shelf: Shelf, tmp_path: Path) -> None:
    await shelf.publish(1)
    execute(shelf.url, "INSERT INTO recipes VALUES ('r', 'r', 's', 't', '{}')")
    for n, state, finished in ((1, "committed", "now()"), (2, "abandoned", "now()"), (3, "claimed", "NULL")):
        execute(
            shelf.url,
            "INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash, finished_at) "
            f"VALUES ('default', {n}, {min(n - 1, 1)}, 0, '{state}', 'r', {finished})",
        )
    for name in ("v1-0123456789ab", "v1-ba9876543210", "v2-0123456789ab", "v3-0123456789ab", "v4-0123456789ab"):
        (tmp_path / "default" / name).mkdir(parents=True)
    for name in (".tmp-v2-0123456789ab", "v2-0123456789ab-mine"):
        (tmp_path / "default" / name).mkdir()
    retention = Retention(shelf.store, AdapterFolder(tmp_path))
    assert await retention.remove() == 2
    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == [
        ".tmp-v2-0123456789ab",
        "v1-0123456789ab",
        "v2-0123456789ab-mine",
        "v3-0123456789ab",  # its trainer may commit it yet
        "v4-0123456789ab",  # no step of this ledger: another installation's
    ]
    assert await retention.remove() == 0


async def test_each_policy_keeps_as_many_versions_as_its_recipe_says(shelf: Shelf, tmp_path: Path) -> None:
    for policy, kept in (("anna", 1), ("ben", 4), ("cleo", None)):
        await ensure_policy(shelf.database, policy, "tiny", [])
        if kept is not None:
            recipe = Recipe(name="keeps", train=Train(kept_versions=kept))
            await PostgresTrainingStore(shelf.database).set_recipe(policy, recipe)
        shelf.commit(*range(1, 6), policy=policy)
        execute(shelf.url, f"UPDATE policies SET active = 5 WHERE id = '{policy}'")
        for n in range(1, 6):
            (tmp_path / policy / f"v{n}-0123456789ab").mkdir(parents=True)
    shelf.age(HOURS)
    assert await Retention(shelf.store, AdapterFolder(tmp_path)).remove() == 4 + 1 + 2
    for policy, first in (("anna", 5), ("ben", 2), ("cleo", 3)):
        left = {path.name.split("-")[0] for path in (tmp_path / policy).iterdir()}
        assert left == {f"v{n}" for n in range(first, 6)}, policy


async def test_files_that_another_policy_began_from_stay_until_it_needs_them_no_more(
    shelf: Shelf, tmp_path: Path
) -> None:
    on_disk(tmp_path, 1, 2, 3, 4)
    for n in range(1, 5):
        await shelf.publish(n)
    operators = PostgresTrainingStore(shelf.database)
    await operators.create_policy("anna", "default", None, 1)
    await shelf.load()
    assert "anna-v1" in shelf.rows()
    assert await shelf.store.activate("anna", 1, 0)
    shelf.age(HOURS)
    await shelf.unload()
    retention = Retention(shelf.store, AdapterFolder(tmp_path))
    assert await retention.remove() == 0  # version 1 of the policy `default` is marked, its files are anna's too
    assert shelf.one("SELECT array_agg(policy || n) FROM versions WHERE removed_at IS NOT NULL") == ["default1"]
    assert left(tmp_path) == ["v1", "v2", "v3", "v4"]
    await operators.roll_back("anna", 0)
    shelf.age(HOURS)
    await shelf.unload()
    assert await retention.remove() == 1
    assert left(tmp_path) == ["v2", "v3", "v4"]
