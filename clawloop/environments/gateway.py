"""Requests of a worker without a database to a gateway: keys of episodes, and the place where artifacts are kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from clawloop.core.errors import EpisodeUnusable, StoreUnavailable, WorkerKeyRefused
from clawloop.core.ids import EpisodeId

log = logging.getLogger(__name__)

# Longer than a gateway takes to restart: what an episode left is lost if it cannot be stored.
PATIENCE_SECONDS = 180.0
_LONGEST_PAUSE = 5.0
_REQUEST_SECONDS = 60.0
_AGAIN = (408, 429, 500, 502, 503, 504)
_NO_ARTIFACT = "0" * 64


class WorkerGateway:
    """Satisfies `clawloop.core.episodes.running.Artifacts`; also gives keys.

    Args:
        url: the gateway's, without a path.
        patience_seconds: how long a request is repeated while the gateway does not answer, or has no room.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/admin/v1/worker"
        self._patience_seconds = patience_seconds

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, key: str, patience_seconds: float = PATIENCE_SECONDS) -> AsyncIterator[WorkerGateway]:
        """
        Args:
            key: with the scope `worker`.
        """
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            yield cls(session, url, patience_seconds)

    async def check(self) -> None:
        """See whether the gateway takes the key; one that does not answer is only logged.

        Raises:
            WorkerKeyRefused: it refuses the key.
        """
        try:
            await self._ask("GET", f"artifacts/{_NO_ARTIFACT}", patience_seconds=0)
        except EpisodeUnusable:
            return  # there is none, as expected
        except StoreUnavailable as error:
            log.warning("the gateway does not answer yet", extra={"why": str(error)})

    async def key_of(self, episode: EpisodeId) -> str:
        answer = json.loads(await self._ask("POST", f"episodes/{episode}/key"))
        return str(answer["key"])

    async def store(self, artifact: bytes) -> str:
        sha256 = hashlib.sha256(artifact).hexdigest()
        answer = json.loads(await self._ask("PUT", f"artifacts/{sha256}", artifact))
        return str(answer["digest"])

    async def load(self, sha256: str) -> bytes:
        if not sha256.isalnum():  # of an episode that left nothing
            raise EpisodeUnusable("no artifact was kept")
        return await self._ask("GET", f"artifacts/{sha256}")

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, patience_seconds: float | None = None
    ) -> bytes:
        """
        Raises:
            EpisodeUnusable: the gateway says that a retry gives the same.
            WorkerKeyRefused: it refuses the key.
            StoreUnavailable: it did not answer in time.
        """
        until = time.monotonic() + (self._patience_seconds if patience_seconds is None else patience_seconds)
        pause = 0.2
        while True:
            try:
                return await self._ask_once(method, path, body)
            except (aiohttp.ClientError, TimeoutError, StoreUnavailable) as error:
                left = until - time.monotonic()
                if left <= 0:
                    why = str(error) if isinstance(error, StoreUnavailable) else type(error).__name__
                    raise StoreUnavailable(f"the gateway at {self._url}: {why}") from error
            # Many episodes wait for the same gateway; all at once they would find it busy again.
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.5)))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _ask_once(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {} if body is None else {"Content-Type": "application/x-tar"}
        async with self._session.request(method, f"{self._url}/{path}", data=body, headers=headers) as answer:
            if answer.ok:
                return await answer.read()
            if answer.status in (401, 403):
                raise WorkerKeyRefused(
                    f"the gateway at {self._url} refuses the key ({answer.status}): make one by"
                    " `clawloop key create --scope worker`, and set CLAWLOOP_WORKER_KEY"
                )
            if answer.status in _AGAIN:
                raise StoreUnavailable(f"status {answer.status}")
            raise EpisodeUnusable(f"{method} {path}: the gateway answers {answer.status}")
