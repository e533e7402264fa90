"""What agents left, by its digest, in a folder."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from clawloop.errors import RecordUnusable


class ArtifactFolder:
    """Satisfies `activities.episodes.ports.Artifacts`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def store(self, artifact: bytes) -> str:
        """The artifact's SHA-256 in hex."""
        return await asyncio.to_thread(self._store, artifact)

    async def load(self, sha256: str) -> bytes:
        """
        Raises:
            RecordUnusable: it is not there, or damaged.
        """
        return await asyncio.to_thread(self._load, sha256)

    async def prune(self, age: timedelta) -> int:
        """Delete what was stored longer ago than this, and what interrupted writes left; the number of files."""
        return await asyncio.to_thread(self._prune, age)

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
        sha256 = hashlib.sha256(artifact).hexdigest()
        path = self._path(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of its own: two episodes that left the same are stored at the same moment.
        partial = path.with_suffix(f".{uuid4().hex}.tmp")
        partial.write_bytes(artifact)
        partial.rename(path)
        return sha256

    def _load(self, sha256: str) -> bytes:
        try:
            artifact = self._path(sha256).read_bytes()
        except FileNotFoundError:
            raise RecordUnusable(f"artifact {sha256} is not in this worker's data folder") from None
        if hashlib.sha256(artifact).hexdigest() != sha256:
            raise RecordUnusable(f"artifact {sha256} is damaged")
        return artifact

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / f"{sha256}.tar"
