"""Why a turn stays on disk is logged once for each reason, though the turn is tried again each second."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from api.recording import insert_queue
from api.recording.spool import Spool
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.errors import EncryptionKeyMissing
from clawloop.core.ids import TurnId
from tests.api.conftest import until
from tests.api.test_recording import GatedStore, running_recorder, texts_of
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_queue, "RETRY_SECONDS", 0.01)


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
