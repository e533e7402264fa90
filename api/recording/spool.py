"""A spool of turns that wait for PostgreSQL: one fsynced file each, bounded in size, read oldest first."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from clawloop.core.contracts.sessions import KeyOfTurns
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.durable_files import sync_folder
from clawloop.core.encryption.key_file import SETTING
from clawloop.core.encryption.sealer import Sealer, is_sealed
from clawloop.core.errors import EncryptionKeyMissing, RecordUnusable, SetupError
from clawloop.core.ids import ApiKeyId, TurnId

# Reserved room --------------------------------------------------------------------------------------------------------
# Room on the disk that is kept for turns: a file without content, given up piece by piece when the disk is full.

# About fifty turns of 32,000 tokens, or five thousand short ones.
RESERVE_BYTES = 16 * 2**20
# Beside a turn's content, its file and folder take a few blocks.
_BLOCKS = 16 * 1024


class DiskReserve:
    """Space kept free on the disk. The methods block on the disk: call them from a thread.

    Args:
        path: of the file; its folder exists.
        size_bytes: the largest size.
    """

    def __init__(self, path: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self._path = path
        self._size = size_bytes
        self._lock = threading.Lock()
        self.restore()

    @property
    def left_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def release(self, size_bytes: int) -> bool:
        """Give up room for a turn of this size; False if none is left."""
        with self._lock:
            left = self.left_bytes
            if left:
                os.truncate(self._path, max(0, left - size_bytes - _BLOCKS))
            return bool(left)

    def restore(self) -> None:
        """Take the room again, if as much stays free for others."""
        with self._lock, self._path.open("ab") as file:
            missing = self._size - self.left_bytes
            if missing > 0 and shutil.disk_usage(self._path).free >= 2 * missing:
                _allocate(file.fileno(), self._size - missing, missing)


def _allocate(descriptor: int, offset: int, length: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, length)
    except OSError:  # others were faster, or the file system cannot: without a reserve turns are held in memory sooner
        os.ftruncate(descriptor, offset)


# The spool ------------------------------------------------------------------------------------------------------------
# A spool of turns that wait for PostgreSQL: one fsynced file each, bounded in size, read oldest first.
#
# Turn ids sort by the time the request began, and a turn ends before a request that continues it begins. So the order
# of file names stores parents first, which spares PostgreSQL from moving turns below a late parent. A file that can
# never be stored is moved to `rejected/`, not deleted.

_RECORD = TypeAdapter(TurnRecord)
_SUFFIX = ".json"
_PARTIAL = ".tmp"
_REJECTED = "rejected"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# The disk is asked this seldom what other gateways have spooled; with thousands of files it takes 10 ms.
_OTHERS_SECONDS = 1.0


class SpoolFull(Exception):
    """The turn would exceed the size limit."""


class Spool:
    """A folder of turns. Its methods block on the disk: call them from a thread.

    Several gateways may share the folder: each locks a sub-folder of its own, so a file belongs to one gateway. The
    turns of a gateway that died are taken over by another gateway.

    Args:
        folder: created if missing.
        limit_bytes: the largest total size of the turns that wait, those of other gateways included as of a second
            ago; and once more of those that were rejected.
        reserve_bytes: kept free on the disk for turns, by each gateway.
        sealer: encrypts what is written from now on; None: nothing is encrypted.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, reserve_bytes: int = RESERVE_BYTES, sealer: Sealer | None = None
    ) -> None:
        self._sealer = sealer
        self._limit_bytes = limit_bytes
        self._sizes: dict[TurnId, int] = {}
        self._others = 0
        self._others_until = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._shared = folder
        self._folder, self._lock = _lock_subfolder(folder)
        _remove_partial(self._folder)
        for path in self._folder.glob(f"*{_SUFFIX}"):
            self._add(path)
        self._reserve = DiskReserve(self._folder / "reserve", reserve_bytes)
        self.take_over()  # what stays behind is the drain's, which tries again and says why

    def close(self) -> None:
        """Release the sub-folder to the next gateway."""
        os.close(self._lock)

    @property
    def turns(self) -> int:
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def write(self, record: TurnRecord) -> None:
        """Write a turn; returns once it would survive a power cut.

        Raises:
            SpoolFull: nothing was written.
            OSError: the disk is full or gone.
        """
        path = self._write(self._folder, record, self.size_bytes + self._others_bytes())
        self._sizes[record.turn_id] = path.stat().st_size

    def write_rejected(self, record: TurnRecord) -> Path:
        """Write a turn that can never be stored to `rejected/`, where a person can inspect it.

        Raises:
            SpoolFull, OSError: as `write`.
        """
        rejected = self._rejected_folder()
        return self._write(rejected, record, _total_size(self._shared.glob(f"gateway-*/{_REJECTED}")))

    def restore_reserve(self) -> None:
        """Keep room on the disk free again, once no turn waits."""
        if not self._sizes:
            self._reserve.restore()

    def take_over(self) -> dict[Path, OSError]:
        """Take over the turns of gateways that died, and remove what they had only begun to write.

        Returns:
            The files and folders that could not be read or changed, and why; all others were taken over.
        """
        failed: dict[Path, OSError] = {}
        with _noting(failed, self._shared):
            for other in _subfolders(self._shared):
                if other != self._folder:
                    with _noting(failed, other):
                        self._take_over(other, failed)
        return failed

    def _take_over(self, other: Path, failed: dict[Path, OSError]) -> None:
        if (lock := _try_lock(other)) is None:
            return
        try:
            for path in other.glob(f"*{_SUFFIX}"):
                with _noting(failed, path):
                    self._add(path.rename(self._folder / path.name))
            _remove_partial(other)
        finally:
            os.close(lock)

    def turn_ids(self) -> list[TurnId]:
        """The spooled turns, oldest first."""
        return sorted(self._sizes)

    def read(self, turn_id: TurnId) -> TurnRecord:
        """
        Raises:
            EncryptionKeyMissing
            RecordUnusable: the file is not a turn, or was changed after it was encrypted.
        """
        return read_turn(self._path(turn_id), self._sealer)

    def remove(self, turn_id: TurnId) -> None:
        self._path(turn_id).unlink(missing_ok=True)
        self._sizes.pop(turn_id, None)

    def reject(self, turn_id: TurnId) -> Path:
        """Move a turn that can never be stored to `rejected/`, where a person can inspect it."""
        target = self._path(turn_id).rename(self._rejected_folder() / f"{turn_id}{_SUFFIX}")
        self._sizes.pop(turn_id, None)
        return target

    def _path(self, turn_id: TurnId) -> Path:
        return self._folder / f"{turn_id}{_SUFFIX}"

    def _rejected_folder(self) -> Path:
        rejected = self._folder / _REJECTED
        rejected.mkdir(exist_ok=True)
        return rejected

    def _add(self, path: Path) -> None:
        """Count a file, if it is a turn's."""
        with suppress(ValueError):
            self._sizes[TurnId(uuid.UUID(path.stem))] = path.stat().st_size

    def _others_bytes(self) -> int:
        """The size of the turns that wait in other gateways' folders."""
        now = time.monotonic()
        if now >= self._others_until:
            self._others = _total_size(other for other in _subfolders(self._shared) if other != self._folder)
            self._others_until = now + _OTHERS_SECONDS
        return self._others

    def _write(self, folder: Path, record: TurnRecord, size_bytes: int) -> Path:
        content = _RECORD.dump_json(record)
        if self._sealer is not None:
            content = self._sealer.seal(content, _place(record.turn_id))
        if size_bytes + len(content) > self._limit_bytes:
            raise SpoolFull(f"{size_bytes} bytes are spooled, the limit is {self._limit_bytes}")
        path = folder / f"{record.turn_id}{_SUFFIX}"
        while True:
            try:
                _write_synced(path, content)
                return path
            except OSError as error:
                if error.errno not in _NO_ROOM or not self._reserve.release(len(content)):
                    raise


def rejected_turns(folder: Path) -> list[Path]:
    """The files of turns that were set aside, of all gateways of a spool."""
    return sorted(folder.glob(f"gateway-*/{_REJECTED}/*{_SUFFIX}"))


def waiting_turns(folder: Path) -> Iterator[Path]:
    """The files of turns that gateways left which do not run; none takes them over before the next one is asked for."""
    for subfolder in sorted(_subfolders(folder)):
        if (lock := _try_lock(subfolder)) is None:
            continue
        try:
            yield from sorted(subfolder.glob(f"*{_SUFFIX}"))
        finally:
            os.close(lock)


def read_turn(path: Path, sealer: Sealer | None) -> TurnRecord:
    """
    Raises:
        EncryptionKeyMissing
        RecordUnusable: the file is not a turn, or was changed after it was encrypted.
        OSError
    """
    turn_id, content = TurnId(uuid.UUID(path.stem)), path.read_bytes()
    if not content.startswith(b"{"):
        if sealer is None:
            unusable = EncryptionKeyMissing if is_sealed(content) else RecordUnusable
            raise unusable(f"spooled turn {turn_id} is encrypted, or damaged: set {SETTING}")
        content = sealer.open(content, _place(turn_id))
    try:
        return _RECORD.validate_json(content)
    except ValidationError as error:
        raise RecordUnusable(f"spooled turn {turn_id}: {error.error_count()} fields cannot be read") from error


def put_back(folder: Path, paths: Iterable[Path]) -> int:
    """Have turns that were set aside be stored after all, by the next gateway that looks for turns of others.

    Returns:
        How many there were.
    """
    count = 0
    subfolder, lock = _lock_subfolder(folder)
    try:
        # Owned by the gateways' user, also if another user runs this.
        owner = folder.stat()
        for made in (subfolder, subfolder / "lock"):
            os.chown(made, owner.st_uid, owner.st_gid)
        for path in paths:
            with suppress(FileNotFoundError):  # the file was deleted meanwhile
                path.rename(subfolder / path.name)
                count += 1
    finally:
        os.close(lock)
    return count


def reseal_turn(path: Path, sealer: Sealer, *, decrypt: bool) -> bool:
    """Encrypt a turn's file by the first key, or decrypt it; false if there is nothing to do.

    Raises:
        ContentUnreadable: no key opens it.
        FileNotFoundError
    """
    stored, place = path.read_bytes(), _place(TurnId(uuid.UUID(path.stem)))
    is_plain = stored.startswith(b"{")
    if is_plain if decrypt else stored.startswith(sealer.head):
        return False
    content, before = stored if is_plain else sealer.open(stored, place), path.stat()
    _write_synced(path, content if decrypt else sealer.seal(content, place))
    os.chown(path, before.st_uid, before.st_gid)  # the gateway's user, also if another user runs this
    return True


@contextmanager
def _noting(failed: dict[Path, OSError], path: Path) -> Iterator[None]:
    """Go on after an error of the disk with this file or folder."""
    try:
        yield
    except OSError as error:
        failed[path] = error


def _place(turn_id: TurnId) -> str:
    return f"spool of {turn_id}"


def _write_synced(path: Path, content: bytes) -> None:
    partial = path.with_suffix(_PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:  # a full disk: what was written would take the room that comes free
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _remove_partial(folder: Path) -> None:
    """Remove files whose writer died before they were whole: their turns were not acknowledged to any client."""
    for place in (folder, folder / _REJECTED):
        for partial in place.glob(f"*{_PARTIAL}"):
            if not partial.is_dir():
                partial.unlink()


def _subfolders(folder: Path) -> Iterator[Path]:
    """The gateways' sub-folders; a file beside them, e.g. an archive of one, is left alone."""
    return (path for path in folder.glob("gateway-*") if path.is_dir())


def _total_size(folders: Iterable[Path]) -> int:
    """Bytes of the turns directly in these folders."""
    total = 0
    for folder in folders:
        for path in folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # stored meanwhile
                total += path.stat().st_size
    return total


def _lock_subfolder(folder: Path) -> tuple[Path, int]:
    """The first sub-folder that no gateway has locked, and its lock."""
    for number in itertools.count():
        subfolder = folder / f"gateway-{number}"
        try:
            subfolder.mkdir(exist_ok=True)
        except FileExistsError:  # a file has its name
            continue
        if (lock := _try_lock(subfolder)) is not None:
            return subfolder, lock
    raise AssertionError("unreachable")


def _try_lock(folder: Path) -> int | None:
    """A lock on the folder, released when the process ends; None if another process has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


# Turns of dead gateways -----------------------------------------------------------------------------------------------
# Turns on this machine's disk that no running gateway is about to store, as recovery sees them.

Result = TypeVar("Result")


class StrandedTurns:
    """Every call raises SetupError when this user may not read or change the spool.

    Args:
        folder: the spool of all gateways of a data folder.
        sealer: None: nothing is encrypted.
    """

    def __init__(self, folder: Path, sealer: Sealer | None) -> None:
        self._folder = folder
        self._sealer = sealer

    async def keys(self) -> dict[KeyOfTurns, int]:
        """Number of each key's turns that wait on this machine's disk, or were set aside as impossible to store."""
        return await asyncio.to_thread(self._in_spool, self._keys)

    async def put_back_rejected(self, keys: Collection[ApiKeyId]) -> int:
        """Return the set-aside turns of these keys to the spool, so that a gateway stores them; their number."""
        return await asyncio.to_thread(self._in_spool, lambda: self._put_back(keys))

    def _in_spool(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except OSError as error:
            raise SetupError(f"{error}: run this as the user of the gateways, whose spool it reads") from error

    def _keys(self) -> dict[KeyOfTurns, int]:
        paths = chain(rejected_turns(self._folder), waiting_turns(self._folder))
        return dict(Counter(key for _, key in self._read(paths)))

    def _put_back(self, keys: Collection[ApiKeyId]) -> int:
        paths = [path for path, key in self._read(rejected_turns(self._folder)) if key.key in keys]
        return put_back(self._folder, paths) if paths else 0

    def _read(self, paths: Iterable[Path]) -> Iterator[tuple[Path, KeyOfTurns]]:
        for path in paths:
            try:
                record = read_turn(path, self._sealer)
            except (RecordUnusable, EncryptionKeyMissing, FileNotFoundError, ValueError):
                continue  # its gateway says so; or it was taken over meanwhile, or is no turn's file
            if record.episode_id is None:  # an episode's key ends with it
                yield path, KeyOfTurns(record.api_key_id, record.policy)
