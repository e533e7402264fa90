"""Chat requests to vLLM over aiohttp's client, which costs a third of httpx's CPU per streamed token.

Knows nothing about turns. Tries again only while nothing of an answer has been handed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import orjson

from clawloop.contracts.serving import Engine, RouteKey
from clawloop.errors import EngineBroke, EngineRejected, EngineUnavailable
from clawloop.serving.events import event_data
from clawloop.serving.rotation import Rotation

log = logging.getLogger(__name__)

# Loopback or the next machine: a connection that takes longer will not come.
CONNECT_SECONDS = 5.0
# The client's own limit (OpenClaw: 1800): a long prompt on a CPU takes minutes to its first token.
SILENCE_SECONDS = 1800.0
# The last bytes after [DONE] are on their way already.
END_SECONDS = 1.0
# The largest event carries the prompt's ids: a million tokens of context are below this.
EVENT_LIMIT_BYTES = 16 * 1024 * 1024
# A request may meet an engine that dies and one that has just restarted; after a third it is its own doing.
ATTEMPTS = 3
# Long enough for a busy event loop; a dead engine refuses the connection at once.
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
# A CPU engine at work on a long prompt may not answer a probe; one that is silent this often hangs.
SILENT_PROBES = 12


class EngineAnswer:
    """An answer that has begun: status 200, nothing read yet."""

    def __init__(self, engine_id: str, response: aiohttp.ClientResponse) -> None:
        self.engine_id = engine_id
        self._response = response

    async def events(self) -> AsyncIterator[bytes]:
        try:
            async for data in event_data(self._response.content.iter_any(), EVENT_LIMIT_BYTES):
                if data == b"[DONE]":
                    # Read to the end, so that the connection can serve the next request.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(END_SECONDS):
                            await self._response.content.read()
                    return
                yield data
        except (aiohttp.ClientError, TimeoutError, ValueError, ConnectionError) as error:
            raise EngineBroke(f"engine {self.engine_id} broke off: {_said(error)}", self.engine_id) from error
        raise EngineBroke(f"engine {self.engine_id} ended its stream too early", self.engine_id)

    async def body(self) -> bytes:
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineBroke(f"engine {self.engine_id} broke off: {_said(error)}", self.engine_id) from error


class ChatEngines:
    """Sends requests to the engines in rotation, and keeps watch over their health.

    Use as an async context manager: inside it the connections are open and the watch runs.

    Args:
        rotation: chooses; is told what is healthy.
        engines: the engines as the directory knows them now.
        probe_seconds: how often each engine's `/health` is asked.
    """

    def __init__(
        self, rotation: Rotation, engines: Callable[[], Sequence[Engine]], *, probe_seconds: float = 1.0
    ) -> None:
        self._rotation = rotation
        self._engines = engines
        self._probe_seconds = probe_seconds
        self._client: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._silent: Counter[str] = Counter()
        self._probing: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> ChatEngines:
        self._client = aiohttp.ClientSession(
            # No limit of our own on connections: the engine queues better than we do. It closes an idle one after
            # 5 s (uvicorn's default); using that one would look like a dead engine.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS, total=None),
            auto_decompress=False,
        )
        self._watch = asyncio.create_task(self._keep_watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        watching = [task for task in (self._watch, *self._probing.values()) if task is not None]
        for task in watching:
            task.cancel()
        if watching:
            await asyncio.wait(watching)
        if self._client is not None:
            await self._client.close()

    def lost(self, engine_id: str, wanted: RouteKey) -> None:
        self._rotation.lost(engine_id, wanted.policy, wanted.version)

    def has(self, policy: str, version: int) -> bool:
        return self._rotation.has(policy, version)

    def healthy(self) -> frozenset[str]:
        return self._rotation.healthy()

    @asynccontextmanager
    async def ask(self, wanted: RouteKey, body: bytes) -> AsyncIterator[EngineAnswer]:
        engine, response = await self._begin(wanted, body)
        try:
            if response.status != 200:
                refusal = await _refusal(response, engine.id)
                if response.status >= 500 and await self._is_gone(engine):
                    # vLLM answers 500 once before a dying engine's server is gone.
                    self._rotation.mark(engine.id, healthy=False)
                    raise EngineBroke(f"engine {engine.id} died: {refusal}", engine.id)
                raise refusal
            yield EngineAnswer(engine.id, response)
        finally:
            # Closing the connection is what makes vLLM abort a request; one read to its end is kept alive.
            response.close()
            self._rotation.release(engine)

    async def _begin(self, wanted: RouteKey, body: bytes) -> tuple[Engine, aiohttp.ClientResponse]:
        failed: str | None = None
        for attempt in range(1, ATTEMPTS + 1):
            engine = await self._rotation.acquire(wanted.policy, wanted.version, wanted.affinity, failed)
            try:
                return engine, await self._post(engine, body)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                # Not a word came back: the request can go elsewhere, or wait until this engine is up again.
                failed = engine.id
                self._rotation.release(engine)
                self._rotation.mark(engine.id, healthy=False)
                log.warning(
                    "engine unreachable",
                    extra={"engine_id": engine.id, "why": _said(error), "attempt": attempt},
                )
            except BaseException:
                self._rotation.release(engine)
                raise
        raise EngineUnavailable(f"{ATTEMPTS} engines in turn broke off before they answered")

    async def _post(self, engine: Engine, body: bytes) -> aiohttp.ClientResponse:
        assert self._client is not None, "used outside its context"
        return await self._client.post(
            f"{engine.url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        )

    async def _keep_watch(self) -> None:
        while True:
            engines = self._engines()
            self._rotation.forget_all_but({engine.id for engine in engines})
            for engine in engines:
                # One that is silent is not asked twice at once, and keeps nobody from asking the others.
                if engine.id not in self._probing:
                    probe = self._probing[engine.id] = asyncio.create_task(self._probe(engine))
                    probe.add_done_callback(partial(self._probed, engine.id))
            await asyncio.sleep(self._probe_seconds)

    def _probed(self, engine_id: str, probe: asyncio.Task[None]) -> None:
        del self._probing[engine_id]
        if not probe.cancelled() and (error := probe.exception()) is not None:
            # One engine's odd address must not end the watch over the others.
            self._rotation.mark(engine_id, healthy=False)
            log.error("engine not probed", extra={"engine_id": engine_id, "why": _said(error)})

    async def _probe(self, engine: Engine) -> None:
        was = engine.id in self._rotation.healthy()
        try:
            healthy = await self._answers(engine)
            self._silent[engine.id] = 0
        except TimeoutError:
            self._silent[engine.id] += 1
            healthy = was and self._silent[engine.id] < SILENT_PROBES
        if healthy != was:
            log.info(
                "engine in rotation" if healthy else "engine out of rotation",
                extra={"engine_id": engine.id},
            )
        self._rotation.mark(engine.id, healthy=healthy)

    async def _is_gone(self, engine: Engine) -> bool:
        try:
            return not await self._answers(engine)
        except TimeoutError:
            return False

    async def _answers(self, engine: Engine) -> bool:
        """
        Raises:
            TimeoutError: it is silent, which a busy engine may be.
        """
        assert self._client is not None, "used outside its context"
        try:
            async with self._client.get(f"{engine.url}/health", timeout=PROBE_TIMEOUT) as response:
                return response.status == 200
        except TimeoutError:
            raise
        except (aiohttp.ClientError, ConnectionError):
            return False


async def _refusal(response: aiohttp.ClientResponse, engine_id: str) -> EngineRejected:
    """The engine's own error, whatever shape it came in."""
    try:
        raw = await response.read()
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        raw = b""
    error: dict[str, object] = {"message": f"the engine answered {response.status} without a reason"}
    with suppress(orjson.JSONDecodeError):
        parsed = orjson.loads(raw)
        said = parsed.get("error", parsed) if isinstance(parsed, dict) else None
        if isinstance(said, dict) and isinstance(said.get("message"), str):
            error = said
    return EngineRejected(response.status, error, response.headers.get("Retry-After"), engine_id)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
