"""Turns in memory go to the disk as soon as it takes them, whatever PostgreSQL does, and to PostgreSQL likewise."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from api.recording import insert_queue
from api.recording import recorder as recorder_module
from api.recording.recorder import Recorder
from api.recording.spool import Spool
from clawloop.core.contracts.turns import InsertedTurn, TurnRecord
from tests.api.conftest import until
from tests.api.test_recording import GatedStore, Unavailable, lost, record_all, running_recorder, texts_of
from tests.fakes.turn_store import FakeTurnStore


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recorder_module, insert_queue):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)


class FullSpool(Spool):
    """It takes a turn only while it has room.

    Attributes:
        refused: how many it did not take.
    """

    has_room = False
    refused = 0

    def write(self, record: TurnRecord) -> None:
        if not self.has_room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(record)


class Unresponsive(GatedStore):
    """It does not even end what is cancelled, before its gate is open."""

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        try:
            return await super().insert_many(records)
        except asyncio.CancelledError:
            await self.gate.wait()
            raise


@asynccontextmanager
async def recorder_holding(store: GatedStore, spool: FullSpool, *texts: str) -> AsyncIterator[Recorder]:
    """A recorder with these turns in memory; the store answers once the test opens its gate, or ends."""
    store.gate.clear()
    async with running_recorder(Unavailable(store.turns), store, spool) as recorder:
        try:
            await record_all(recorder, *texts)
            yield recorder
        finally:
            store.gate.set()


async def test_turns_in_memory_go_to_the_disk_while_postgres_hangs(tmp_path: Path) -> None:
    hanging, spool = GatedStore(FakeTurnStore()), FullSpool(tmp_path, 10**8)
    async with recorder_holding(hanging, spool, "a", "b") as recorder:
        await until(lambda: hanging.batches)  # PostgreSQL does not answer from now on
        refused = spool.refused
        await until(lambda: spool.refused > refused + 2)
        spool.has_room = True
        await until(lambda: spool.turns == 2 and not recorder._held._turns)
        hanging.gate.set()
        await until(lambda: not spool.turns)
    assert sorted(map(str, texts_of(hanging.turns))) == ["a", "b"]


async def test_at_the_end_turns_in_memory_go_to_the_disk_before_postgres_is_waited_for(tmp_path: Path) -> None:
    hanging, spool = Unresponsive(FakeTurnStore()), FullSpool(tmp_path, 10**8)
    async with recorder_holding(hanging, spool, "a") as recorder:
        await until(lambda: hanging.batches)
        to_the_disk, _ = recorder._held._tasks
        to_the_disk.cancel()  # no try before the end
        await asyncio.wait([to_the_disk])
        spool.has_room = True
        ending = asyncio.create_task(recorder.__aexit__())
        await until(lambda: spool.turns == 1)
        assert not ending.done()
        hanging.gate.set()
        await ending
        assert lost(recorder, "stopped") == 0


@pytest.mark.parametrize("place", ["disk", "postgres"])
async def test_after_a_bug_turns_in_memory_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    store, spool = GatedStore(FakeTurnStore()), FullSpool(tmp_path, 10**8)
    broken: list[object] = []

    def breaks(*arguments: object) -> None:
        broken.append(arguments)
        raise KeyError("a bug")

    async with recorder_holding(store, spool, "a") as recorder:
        with monkeypatch.context() as patched:
            if place == "disk":
                patched.setattr(spool, "write", breaks)
                await until(lambda: broken)
            else:
                store.breaks = {"a"}
                store.gate.set()
                await until(lambda: "turn in memory not stored" in caplog.text)
                store.breaks = set()
        spool.has_room = place == "disk"
        await until(lambda: not recorder._held._turns)


async def test_a_notification_that_breaks_keeps_no_turn_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, spool = GatedStore(FakeTurnStore()), FullSpool(tmp_path, 10**8)
    async with recorder_holding(store, spool, "a", "b") as recorder:
        monkeypatch.setattr(recorder._notifications, "_add_turn", Mock(side_effect=KeyError("a bug")))
        store.gate.set()
        await until(lambda: not recorder._held._turns)
    assert sorted(map(str, texts_of(store.turns))) == ["a", "b"]
    assert "notification not queued" in caplog.text
    assert lost(recorder, "stopped") == 0


async def test_a_bug_at_the_end_costs_no_turn_that_postgres_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spool = GatedStore(FakeTurnStore()), FullSpool(tmp_path, 10**8)
    async with recorder_holding(store, spool, *(texts := [f"turn {number}" for number in range(9)])) as recorder:
        monkeypatch.setattr(recorder_module, "RETRY_SECONDS", 10**6)
        monkeypatch.setattr(spool, "write", Mock(side_effect=KeyError("a bug")))
    assert sorted(map(str, texts_of(store.turns))) == texts
    assert lost(recorder, "stopped") == 0
