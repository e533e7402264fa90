"""The disk does not let files of the spool go, or a turn stays there: it concerns no other turn, and is logged once."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.recording import insert_queue
from api.recording.spool import Spool
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnRecord
from clawloop.core.errors import EncryptionKeyMissing
from clawloop.core.ids import TurnId
from tests.api.conftest import until
from tests.api.test_recording import GatedStore, is_stuck, lost, running_recorder, texts_of
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record

# The disk does not let files of the spool go: that concerns these files and no other turn, and ends with its cause.


class RemountedDisk:
    """While it is read-only, no turn's file can be removed or moved.

    Attributes:
        writable: names of files that can be, nevertheless.
        refused: how often that was tried.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_only = True
        self.writable: set[str] = set()
        self.refused = 0
        for name in ("unlink", "rename"):
            monkeypatch.setattr(Path, name, self._guarded(getattr(Path, name)))

    def _guarded(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(path: Path, *arguments: Any, **options: Any) -> Any:
            if self.read_only and path.suffix == ".json" and path.name not in self.writable:
                self.refused += 1
                raise OSError(errno.EROFS, "Read-only file system")
            return change(path, *arguments, **options)

        return guarded


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_queue, "RETRY_SECONDS", 0.01)


def spool_all(spool: Spool, *texts: str) -> list[TurnRecord]:
    records = [turn_record(text, evidence=SessionEvidence(SessionSource.HEADER, text)) for text in texts]
    for record in records:
        spool.write(record)
    return records


def damage(spool: Spool, record: TurnRecord) -> Path:
    path = spool._path(record.turn_id)
    path.write_bytes(b'{"turn_id": ')
    return path


@pytest.mark.parametrize("retried", [insert_queue.RETRIED_FILES, 3])
async def test_on_a_read_only_disk_each_spooled_turn_is_stored_once_and_removed_when_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retried: int
) -> None:
    monkeypatch.setattr(insert_queue, "RETRIED_FILES", retried)
    store, spool = GatedStore(FakeTurnStore()), Spool(tmp_path, 10**8)
    texts = [f"{n}" for n in range(20)]
    *_, last = spool_all(spool, *texts)
    disk = RemountedDisk(monkeypatch)
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: disk.refused > 3 * len(texts))  # of each turn at its insertion, then in later rounds
        assert (texts_of(store.turns), sum(store.batches)) == (texts, 20)
        assert (spool.turns, is_stuck(recorder)) == (20, True)
        disk.writable = {f"{last.turn_id}.json"}
        await until(lambda: spool.turns == 19)  # those before it are tried again, too, and do not hold it up
        disk.read_only = False
        await until(lambda: not spool.turns and not is_stuck(recorder))
        assert not recorder._drain._settled
    assert sum(store.batches) == 20
    assert not list(tmp_path.glob("*/*.json"))


async def test_turns_that_cannot_be_set_aside_hold_up_no_others_and_are_set_aside_later(tmp_path: Path) -> None:
    store, spool = GatedStore(FakeTurnStore()), Spool(tmp_path, 10**8)
    store.poison.add("unusable")
    damaged, unusable, *_ = spool_all(spool, "damaged", "unusable", "fine")
    damage(spool, damaged)
    obstacle = tmp_path / "gateway-0" / "rejected"
    obstacle.write_bytes(b"a file where the folder would be")
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: is_stuck(recorder) and spool.turns == 2)
        spool_all(spool, "later")
        await until(lambda: texts_of(store.turns) == ["fine", "later"])  # in a later round
        assert (store.batches, is_stuck(recorder), lost(recorder, "rejected")) == ([2, 1], True, 0)
        obstacle.unlink()
        await until(lambda: not spool.turns and not is_stuck(recorder))
        assert (store.batches, lost(recorder, "rejected")) == ([2, 1], 2)
    set_aside = sorted(path.stem for path in obstacle.glob("*.json"))
    assert set_aside == [str(damaged.turn_id), str(unusable.turn_id)]


async def test_a_turn_that_somebody_deletes_while_it_cannot_be_set_aside_is_forgotten(tmp_path: Path) -> None:
    store, spool = GatedStore(FakeTurnStore()), Spool(tmp_path, 10**8)
    [damaged] = spool_all(spool, "damaged")
    path = damage(spool, damaged)
    obstacle = tmp_path / "gateway-0" / "rejected"
    obstacle.write_bytes(b"a file where the folder would be")
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: is_stuck(recorder))
        path.unlink()
        obstacle.unlink()
        await until(lambda: not spool.turns and not is_stuck(recorder))
        assert lost(recorder, "rejected") == 0


async def test_a_file_of_a_dead_gateway_that_cannot_be_moved_holds_up_no_other_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(insert_queue, "TAKE_OVER_SECONDS", 0.01)
    store = GatedStore(FakeTurnStore())
    dead, spool = Spool(tmp_path, 10**8), Spool(tmp_path, 10**8)
    [stays, *others] = spool_all(dead, "stays", "b", "c", "d")
    dead.close()
    disk = RemountedDisk(monkeypatch)
    disk.writable = {f"{record.turn_id}.json" for record in others}
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: disk.refused > 3)
        await until(lambda: texts_of(store.turns) == ["b", "c", "d"])
        assert is_stuck(recorder)
        [logged] = [line for line in caplog.records if "not taken over" in line.message]
        assert f"{stays.turn_id}.json" in str(vars(logged)["path"])
        disk.read_only = False
        await until(lambda: len(store.turns.records) == 4 and not is_stuck(recorder))
    assert not list(tmp_path.glob("*/*.json"))


# Why a turn stays on disk is logged once for each reason, though the turn is tried again each second.


class BrokenSpool(Spool):
    """It does not give turns back, or let them go, for the reasons that are set.

    Attributes:
        failed: how often.
    """

    unreadable: Exception | None = None
    unremovable: Exception | None = None
    failed = 0

    def read(self, turn_id: TurnId) -> TurnRecord:
        self._fail(self.unreadable)
        return super().read(turn_id)

    def remove(self, turn_id: TurnId) -> None:
        self._fail(self.unremovable)
        super().remove(turn_id)

    def _fail(self, error: Exception | None) -> None:
        if error is not None:
            self.failed += 1
            raise error


def reasons(caplog: pytest.LogCaptureFixture) -> list[object]:
    """The kinds of errors that were logged, in their order."""
    return [line.exc_info[0] for line in caplog.records if line.levelname == "ERROR" and line.exc_info]


async def test_a_turn_that_cannot_be_stored_is_logged_once_for_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, spool = GatedStore(FakeTurnStore()), Spool(tmp_path, 10**8)
    spool.write(turn_record("stuck"))
    store.breaks.add("stuck")
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: len(store.batches) > 5)
        store.keyless.add("stuck")
        store.breaks.clear()
        tried = len(store.batches)
        await until(lambda: len(store.batches) > tried + 5)
        assert reasons(caplog) == [KeyError, EncryptionKeyMissing]
        store.keyless.clear()
        await until(lambda: not spool.turns)
        assert not recorder._drain._explained  # which would grow for ever
    assert texts_of(store.turns) == ["stuck"]


async def test_a_turn_that_cannot_be_read_or_removed_is_logged_once_for_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, spool = GatedStore(FakeTurnStore()), BrokenSpool(tmp_path, 10**8)
    spool.write(turn_record("stuck"))
    spool.unreadable, spool.unremovable = EncryptionKeyMissing("no key"), OSError(errno.EROFS, "Read-only file system")
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: spool.failed > 5)
        spool.unreadable = OSError(errno.EIO, "Input/output error")
        await until(lambda: spool.failed > 10)
        spool.unreadable = None
        await until(lambda: store.turns.records)
        failed = spool.failed
        await until(lambda: spool.failed > failed + 5)
        spool.unremovable = PermissionError(errno.EACCES, "Permission denied")
        failed = spool.failed
        await until(lambda: spool.failed > failed + 5)
        assert reasons(caplog) == [EncryptionKeyMissing, OSError, OSError, PermissionError]
        assert len([line for line in caplog.records if line.levelname == "ERROR"]) == 4
        spool.unremovable = None
        await until(lambda: not spool.turns)
        assert not recorder._drain._explained
    assert texts_of(store.turns) == ["stuck"]
