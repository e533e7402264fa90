"""Turns on local disk that wait for Postgres: one fsynced file each, bounded, entered oldest first.

Knows nothing about Postgres. Turn ids sort by the time a request began, and a turn ends before the next one that
contains it begins, so the order of names enters parents first. A file that can never be entered is set aside in
`rejected/`, not deleted.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import uuid
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from clawloop.contracts.turns import TurnRecord
from clawloop.errors import RecordUnusable
from clawloop.ids import TurnId

_RECORD = TypeAdapter(TurnRecord)
_SUFFIX = ".json"


class SpoolFull(Exception):
    """One more turn would exceed the bound."""


class Spool:
    """A folder of turns. Its methods block on the disk: call them from a thread.

    Several gateways may share the folder: each takes a sub-folder of its own and locks it. What a gateway that died
    left behind is taken over by the next one that starts.

    Args:
        folder: made if missing.
        limit_bytes: how much may wait.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._sizes: dict[TurnId, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock = _take_free(folder)
        _adopt(folder, self._folder)
        for torn in self._folder.glob("*.tmp"):
            torn.unlink()
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(ValueError):  # not one of ours
                self._sizes[TurnId(uuid.UUID(path.stem))] = path.stat().st_size

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)

    @property
    def turns(self) -> int:
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def put(self, record: TurnRecord) -> None:
        """Returns once the turn survives a power cut.

        Raises:
            SpoolFull: nothing was written.
            OSError: the disk is full or gone.
        """
        content = _RECORD.dump_json(record)
        if self.size_bytes + len(content) > self._limit_bytes:
            raise SpoolFull(f"{self.turns} turns wait, {self._limit_bytes} bytes are the limit")
        path = self._path(record.turn_id)
        torn = path.with_suffix(".tmp")
        with torn.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        torn.rename(path)
        self._sync_folder()
        self._sizes[record.turn_id] = len(content)

    def waiting(self) -> list[TurnId]:
        """The turns that wait, oldest first."""
        return sorted(self._sizes)

    def read(self, turn_id: TurnId) -> TurnRecord:
        """
        Raises:
            RecordUnusable: the file does not hold a turn.
        """
        try:
            return _RECORD.validate_json(self._path(turn_id).read_bytes())
        except ValidationError as error:
            raise RecordUnusable(f"spooled turn {turn_id}: {error.error_count()} fields cannot be read") from error

    def remove(self, turn_id: TurnId) -> None:
        self._path(turn_id).unlink(missing_ok=True)
        self._sizes.pop(turn_id, None)

    def set_aside(self, turn_id: TurnId) -> Path:
        """Keep a turn that can never be entered where a person can look at it."""
        rejected = self._folder / "rejected"
        rejected.mkdir(exist_ok=True)
        target = self._path(turn_id).rename(rejected / f"{turn_id}{_SUFFIX}")
        self._sizes.pop(turn_id, None)
        return target

    def _path(self, turn_id: TurnId) -> Path:
        return self._folder / f"{turn_id}{_SUFFIX}"

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _take_free(folder: Path) -> tuple[Path, int]:
    """The first sub-folder nobody has locked, and its lock."""
    for number in itertools.count():
        own = folder / f"gateway-{number}"
        own.mkdir(exist_ok=True)
        if (lock := _try_lock(own)) is not None:
            return own, lock
    raise AssertionError("unreachable")


def _adopt(folder: Path, own: Path) -> None:
    """Move what dead gateways left into our own sub-folder."""
    for other in folder.glob("gateway-*"):
        if other == own or (lock := _try_lock(other)) is None:
            continue
        for path in other.glob(f"*{_SUFFIX}"):
            path.rename(own / path.name)
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A lock that ends with the process; None if another has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
