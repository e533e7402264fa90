"""A folder of artifacts, i.e. of files that agents left, by digest."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from clawloop.core.encryption.key_file import SETTING
from clawloop.core.encryption.sealer import KEYED_BYTES, Sealer
from clawloop.core.errors import DiskFull, EpisodeUnusable, SetupError
from clawloop.core.settings import Settings

log = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0


class ArtifactFolder:
    """Satisfies `clawloop.core.episodes.running.Artifacts`.

    Args:
        min_free_bytes: left free on its disk.
        sealer: encrypts what is stored from now on, and names it by a keyed digest; None: nothing is encrypted.
    """

    def __init__(self, folder: Path, sealer: Sealer | None = None, min_free_bytes: int = 0) -> None:
        self._folder = folder
        self._sealer = sealer
        self._min_free_bytes = min_free_bytes

    async def store(self, artifact: bytes) -> str:
        """The artifact's digest in hex: its SHA-256, or a keyed one.

        Raises:
            DiskFull
        """
        return await asyncio.to_thread(self._store, artifact)

    async def load(self, digest: str) -> bytes:
        """
        Raises:
            EpisodeUnusable: it is not there, or damaged.
        """
        return await asyncio.to_thread(self._load, digest)

    async def delete(self, digest: str) -> None:
        """Delete it, if it is here. Idempotent.

        Raises:
            SetupError: this process may not.
        """
        await asyncio.to_thread(self._delete, digest)

    async def prune(self, age: timedelta) -> int:
        """Delete what was stored longer ago than this, and what interrupted writes left; the number of files."""
        return await asyncio.to_thread(self._prune, age)

    def digests(self) -> list[str]:
        """The digests of all artifacts, plain and encrypted ones."""
        return [path.stem for path in self._folder.glob("??/*.tar")]

    def reseal(self, digest: str) -> bool:
        """Encrypt an artifact by the first key; false if it is. A plain one is found by its old digest afterwards too.

        Raises:
            ContentUnreadable, EncryptionKeyMissing: it cannot be decrypted.
            EpisodeUnusable: it is damaged.
            FileNotFoundError
        """
        assert self._sealer is not None
        path = self._path(digest)
        stored, before = path.read_bytes(), path.stat()
        if _is_keyed(digest):
            if stored.startswith(self._sealer.head):
                return False
            artifact, keyed = self._sealer.open(stored, _place(digest)), digest
        else:
            artifact, keyed = _checked(stored, digest), self._keyed(bytes.fromhex(digest))
        target = self._path(keyed)
        self._write(target, self._sealer.seal(artifact, _place(keyed)))
        for changed in (target, target.parent):
            os.chown(changed, before.st_uid, before.st_gid)  # of the worker's user, whoever runs this
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))  # it is as old as it was
        if keyed != digest:
            path.unlink()
        return True

    def _prune(self, age: timedelta) -> int:
        removed, before = 0, time.time() - age.total_seconds()
        for path in self._folder.glob("??/*"):
            # Stored again, an artifact is as young as its last episode; another worker may prune the same folder.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed

    def _store(self, artifact: bytes) -> str:
        if self._sealer is None:
            digest, stored = hashlib.sha256(artifact).hexdigest(), artifact
        else:
            digest = self._keyed(hashlib.sha256(artifact).digest())
            stored = self._sealer.seal(artifact, _place(digest))
        self._write(self._path(digest), stored)
        return digest

    def _write(self, path: Path, stored: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < self._min_free_bytes + len(stored):
            raise DiskFull(f"{self._folder}: less than {self._min_free_bytes} bytes would stay free")
        # Of its own: two episodes that left the same are stored at the same moment.
        partial = path.with_suffix(f".{uuid4().hex}.tmp")
        partial.write_bytes(stored)
        partial.rename(path)

    def _load(self, digest: str) -> bytes:
        try:
            stored = self._path(digest).read_bytes()
        except FileNotFoundError:
            if self._sealer is not None and not _is_keyed(digest):  # it may have been encrypted since
                return self._load(self._keyed(bytes.fromhex(digest)))
            raise EpisodeUnusable(f"artifact {digest} is not in this worker's data folder") from None
        if not _is_keyed(digest):
            return _checked(stored, digest)
        if self._sealer is None:
            raise EpisodeUnusable(f"artifact {digest} is encrypted: set {SETTING}")
        return self._sealer.open(stored, _place(digest))

    def _delete(self, digest: str) -> None:
        paths = [self._path(digest)]
        if self._sealer is not None and not _is_keyed(digest):  # it may have been encrypted since
            paths.append(self._path(self._keyed(bytes.fromhex(digest))))
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                owner = f"run this as the owner of {self._folder}"
                raise SetupError(f"cannot delete {path}: {error.strerror}: {owner}") from error

    def _keyed(self, sha256: bytes) -> str:
        assert self._sealer is not None
        return self._sealer.digest(sha256).hex()

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / f"{digest}.tar"


async def prune_hourly(artifacts: ArtifactFolder, age: timedelta) -> None:
    """Delete artifacts that are old enough, now and each hour."""
    while True:
        try:
            if removed := await artifacts.prune(age):
                log.info("artifacts deleted", extra={"files": removed, "older_than_days": age.days})
        except OSError as error:
            log.warning("artifacts not deleted", extra={"why": str(error)})
        await asyncio.sleep(PRUNE_SECONDS)


def _is_keyed(digest: str) -> bool:
    """Whether the artifact of this digest is encrypted."""
    return len(digest) == 2 * KEYED_BYTES


def _checked(stored: bytes, digest: str) -> bytes:
    """A plain artifact.

    Raises:
        EpisodeUnusable: it is damaged.
    """
    if hashlib.sha256(stored).hexdigest() != digest:
        raise EpisodeUnusable(f"artifact {digest} is damaged")
    return stored


def _place(digest: str) -> str:
    return f"artifact {digest}"


def open_artifacts(
    settings: Settings, sealer: Sealer | None, stack: AsyncExitStack, min_free_bytes: int = 0
) -> ArtifactFolder:
    """The folder; until the stack is closed, what is older than the settings say is deleted.

    Args:
        min_free_bytes: left free on its disk.
    """
    artifacts = ArtifactFolder(settings.data / "artifacts", sealer, min_free_bytes)
    pruning = asyncio.create_task(prune_hourly(artifacts, timedelta(days=settings.artifact_days)))
    stack.callback(pruning.cancel)
    return artifacts
