"""Chat requests to vLLM engines, retried on another engine only while no byte of an answer has arrived.

Uses aiohttp's client, which costs a third of httpx's CPU per streamed token.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import orjson

from clawloop.core.contracts.serving import Engine, RouteKey, ServedModel
from clawloop.core.errors import EngineBroke, EngineRejected, EngineUnavailable
from clawloop.serving.endpoints import bearer, connector
from clawloop.serving.engine_secret import Secret, no_secret
from clawloop.serving.events import event_data
from clawloop.serving.rotation import Rotation
from clawloop.serving.served_model import ServedModels

log = logging.getLogger(__name__)

# Engines are on this or the next machine: a connection that takes longer will not come.
CONNECT_SECONDS = 5.0
# The client's own limit (OpenClaw: 1800): a long prompt on a CPU takes minutes to its first token.
SILENCE_SECONDS = 1800.0
# For the last bytes after [DONE], which the engine has sent already.
DRAIN_SECONDS = 1.0
# The largest event holds the prompt's ids; those of a million tokens fit.
EVENT_LIMIT_BYTES = 16 * 1024 * 1024
# A request may meet one engine that dies and one that just restarted; after a third the request itself is the cause.
ATTEMPTS = 3
# Long enough for a busy event loop; a dead engine refuses the connection at once.
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
# A CPU engine that reads a long prompt may leave a probe unanswered; after this many in a row it hangs.
MAX_SILENT_PROBES = 12
_UNKNOWN = ServedModel()


_DONE = b"[DONE]"


class EngineAnswer:
    """An engine's answer after its headers: status 200, body not read yet."""

    def __init__(self, engine_id: str, response: aiohttp.ClientResponse) -> None:
        self.engine_id = engine_id
        self._response = response

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yield the payloads of a stream's `data:` lines, in lists as they arrived; ends before `[DONE]`.

        Raises:
            EngineBroke: the stream ended before `[DONE]`, went silent, or the connection broke.
        """
        try:
            async for arrived in event_data(self._response.content.iter_any(), EVENT_LIMIT_BYTES):
                if _DONE not in arrived:
                    yield arrived
                    continue
                if before := arrived[: arrived.index(_DONE)]:
                    yield before
                # Read to the end, so that the connection can serve the next request.
                if not self._response.content.at_eof():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(DRAIN_SECONDS):
                            await self._response.content.read()
                return
        except (aiohttp.ClientError, TimeoutError, ValueError, ConnectionError) as error:
            raise EngineBroke(f"engine {self.engine_id} broke off: {_describe(error)}", self.engine_id) from error
        raise EngineBroke(f"engine {self.engine_id} ended its stream too early", self.engine_id)

    async def body(self) -> bytes:
        """The body of an answer that is not streamed.

        Raises:
            EngineBroke
        """
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineBroke(f"engine {self.engine_id} broke off: {_describe(error)}", self.engine_id) from error


class ChatEngines:
    """Sends chat requests to the engines in rotation, and probes their health.

    Use as an async context manager: inside it connections are open and the health probes run.

    Args:
        rotation: chooses the engine of a request; gets the results of health probes.
        engines: the engines now in the directory.
        probe_seconds: interval between probes of an engine's `/health`.
        secret: sent to engines as Bearer.
    """

    def __init__(
        self,
        rotation: Rotation,
        engines: Callable[[], Sequence[Engine]],
        *,
        probe_seconds: float = 1.0,
        secret: Secret = no_secret,
    ) -> None:
        self._secret = secret
        self._rotation = rotation
        self._engines = engines
        self._probe_seconds = probe_seconds
        self._client: aiohttp.ClientSession | None = None
        self._probe_loop: asyncio.Task[None] | None = None
        self._silent_probes: Counter[str] = Counter()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._models = ServedModels()

    async def __aenter__(self) -> ChatEngines:
        self._client = aiohttp.ClientSession(
            # No limit on connections: where chats are bounded the rotation does it, and else the engine has the better
            # queue.
            connector=connector(),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS, total=None),
            auto_decompress=False,
        )
        self._probe_loop = asyncio.create_task(self._probe_engines())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._probe_loop, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._client is not None:
            await self._client.close()

    def mark_missing(self, engine_id: str, route: RouteKey) -> None:
        """Send the engine no request for this version until it may have loaded it again."""
        self._rotation.mark_missing(engine_id, route.policy, route.version)

    def has_version(self, policy: str, version: int) -> bool:
        """True if an engine that takes requests has this version."""
        return self._rotation.has_version(policy, version)

    def healthy(self) -> frozenset[str]:
        """The ids of the engines that answer."""
        return self._rotation.healthy()

    @asynccontextmanager
    async def open_chat(
        self,
        route: RouteKey,
        body: bytes | Callable[[ServedModel], bytes],
        path: str = "/v1/chat/completions",
        trace: Mapping[str, str] | None = None,
        sending: Callable[[str], Awaitable[None]] | None = None,
    ) -> AsyncIterator[EngineAnswer]:
        """Send a request to an engine that has the version; leaving the context ends the request there.

        Waits, for a limited time, while no such engine is healthy. Tries another engine if one cannot be reached.

        Args:
            body: or what makes it for the model of the engine that was chosen.
            path: the engine's route.
            trace: headers by which traces are joined.
            sending: awaited with the id of each engine that was found, before the request is sent to it.

        Raises:
            EngineRejected: the engine answered with an error.
            EngineBroke: the engine died before it answered.
            EngineUnavailable: no engine could take the request in time.
            EnginesBusy: those that could have as many chats as they may.
        """
        headers = {"Content-Type": "application/json", **(trace or {})}
        engine, response = await self._open(route, body, path, headers, sending)
        try:
            if response.status != 200:
                rejected = await _rejection(response, engine.id)
                if response.status == 401:
                    # The client's own key is valid; the gateway's secret is not.
                    log.error("engine refuses the secret", extra={"engine_id": engine.id})
                    self._rotation.mark(engine.id, healthy=False)  # another engine may answer
                    raise EngineBroke(f"engine {engine.id} refuses this gateway's CLAWLOOP_ENGINE_SECRET", engine.id)
                if response.status >= 500 and await self._is_gone(engine):
                    # A dying vLLM answers 500 once before its server is gone.
                    self._rotation.mark(engine.id, healthy=False)
                    raise EngineBroke(f"engine {engine.id} died: {rejected}", engine.id)
                raise rejected
            yield EngineAnswer(engine.id, response)
        finally:
            # Makes vLLM abort an unfinished request; after a finished one the connection stays open.
            response.close()
            self._rotation.release(engine, owner=route.owner, choices=route.choices)

    async def _open(
        self,
        route: RouteKey,
        body: bytes | Callable[[ServedModel], bytes],
        path: str,
        headers: Mapping[str, str],
        sending: Callable[[str], Awaitable[None]] | None,
    ) -> tuple[Engine, aiohttp.ClientResponse]:
        failed: str | None = None
        for attempt in range(1, ATTEMPTS + 1):
            engine = await self._rotation.acquire(
                route.policy, route.version, route.affinity, failed, owner=route.owner, choices=route.choices
            )
            try:
                content = body if isinstance(body, bytes) else body(self._models.known(engine.url) or _UNKNOWN)
                if sending is not None:
                    await sending(engine.id)
                return engine, await self._post(engine, content, path, headers)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                # No byte came back: the request can go to another engine, or wait until this one is up again.
                failed = engine.id
                self._rotation.mark(engine.id, healthy=False)
                self._models.forget(engine.url)
                self._rotation.release(engine, owner=route.owner, choices=route.choices)
                log.warning(
                    "engine unreachable",
                    extra={"engine_id": engine.id, "why": _describe(error), "attempt": attempt},
                )
            except BaseException:
                self._rotation.release(engine, owner=route.owner, choices=route.choices)
                raise
        raise EngineUnavailable(f"{ATTEMPTS} engines in a row broke off before they answered")

    async def _post(self, engine: Engine, body: bytes, path: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        assert self._client is not None, "used outside its context"
        # The current secret: the request may have waited minutes for a place.
        sent = {**headers, **bearer(self._secret())}
        # A conversation goes to the engine that was set, and nowhere that the engine names.
        return await self._client.post(f"{engine.url}{path}", data=body, headers=sent, allow_redirects=False)

    async def _probe_engines(self) -> None:
        while True:
            engines = self._engines()
            self._rotation.keep_only({engine.id for engine in engines})
            for engine in engines:
                # Probes run as tasks, one per engine: a silent engine delays no other's probe.
                if engine.id not in self._probes:
                    probe = self._probes[engine.id] = asyncio.create_task(self._probe(engine))
                    probe.add_done_callback(partial(self._finish_probe, engine.id))
            await asyncio.sleep(self._probe_seconds)

    def _finish_probe(self, engine_id: str, probe: asyncio.Task[None]) -> None:
        del self._probes[engine_id]
        if not probe.cancelled() and (error := probe.exception()) is not None:
            # One engine's invalid address must not stop the probes of the others.
            self._rotation.mark(engine_id, healthy=False)
            log.error("engine probe failed", extra={"engine_id": engine_id, "why": _describe(error)})

    async def _probe(self, engine: Engine) -> None:
        was_healthy = engine.id in self._rotation.healthy()
        try:
            healthy = await self._answers(engine)
            self._silent_probes[engine.id] = 0
        except TimeoutError:
            self._silent_probes[engine.id] += 1
            healthy = was_healthy and self._silent_probes[engine.id] < MAX_SILENT_PROBES
        if healthy:
            await self._learn(engine)
        else:
            # It may come back with another model.
            self._models.forget(engine.url)
        if healthy != was_healthy:
            log.info(
                "engine in rotation" if healthy else "engine out of rotation",
                extra={"engine_id": engine.id},
            )
        self._rotation.mark(engine.id, healthy=healthy)

    async def _learn(self, engine: Engine) -> None:
        """Ask once what the engine's model takes, before it gets requests.

        An engine that does not tell all in time gets requests, as they come, and tells the rest after the next probe.
        """
        if self._models.known(engine.url) is not None:
            return
        assert self._client is not None, "used outside its context"
        found = await self._models.learn(self._client, engine.url, bearer(self._secret()))
        if found is not None and found.rules:
            log.info(
                "the chat template does not take every order of roles, so messages are changed for it",
                extra={"engine_id": engine.id, "rules": sorted(found.rules)},
            )

    async def _is_gone(self, engine: Engine) -> bool:
        try:
            return not await self._answers(engine)
        except TimeoutError:
            return False

    async def _answers(self, engine: Engine) -> bool:
        """
        Raises:
            TimeoutError: no answer in time, as from an engine that is busy or hangs.
        """
        assert self._client is not None, "used outside its context"
        try:
            async with self._client.get(f"{engine.url}/health", timeout=PROBE_TIMEOUT) as response:
                return response.status == 200
        except TimeoutError:
            raise
        except (aiohttp.ClientError, ConnectionError):
            return False


async def _rejection(response: aiohttp.ClientResponse, engine_id: str) -> EngineRejected:
    """The engine's own error, from whatever shape it has."""
    try:
        raw = await response.read()
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        raw = b""
    error: dict[str, object] = {"message": f"the engine answered {response.status} without a reason"}
    with suppress(orjson.JSONDecodeError):
        parsed = orjson.loads(raw)
        reported = parsed.get("error", parsed) if isinstance(parsed, dict) else None
        if isinstance(reported, dict) and isinstance(reported.get("message"), str):
            error = reported
    return EngineRejected(response.status, error, response.headers.get("Retry-After"), engine_id)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
