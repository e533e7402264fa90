"""A version is activated once all engines in rotation have it, or some when the wait is over."""

from __future__ import annotations

import asyncio

import pytest

from activities.serving.publishing import PublishingActivities, PublishVersion
from clawloop.core.contracts.notices import Notice, VersionToLoad
from clawloop.core.errors import EngineUnavailable, RecordUnusable, SignalFailed
from db.serving.engines import add_engine, drain_engine
from db.training.steps import PostgresStepStore
from tests.conftest import execute
from tests.engines.conftest import ENGINE, Shelf

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
