"""One JSON request to one of several servers, without retries after an error: those belong to Temporal."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import AddrInfoType

from clawloop.core.contracts.serving import ServedModel
from clawloop.core.families.orders import Rule, request_as_sent
from clawloop.serving.served_model import ServedModels

# Connections ----------------------------------------------------------------------------------------------------------
# TCP connections to engines and judges, which end when the other machine is gone.
#
# A machine that loses its power or network sends no reset, so a client would wait as long as the slowest answer may
# take: half an hour for a chat. With keep-alive the kernel asks the other side's kernel, which answers at once even if
# the server is busy.

# When nothing came for as long, the kernel asks, and asks again.
ASK_SECONDS = 15
# The connection ends when no answer came for as long. A server that stands still and reads nothing of a long request
# counts, too: a minute of that is borne.
GONE_MILLISECONDS = 90_000
# Engines close a connection that was idle for 5 s (uvicorn's default). Using it again at that moment would look like a
# dead engine.
KEEP_SECONDS = 3.0


def connector(*, reused: bool = True) -> aiohttp.TCPConnector:
    """Connections without a limit on their number.

    Args:
        reused: an idle connection is used again for `KEEP_SECONDS`; False: each is used once.
    """
    return aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=KEEP_SECONDS if reused else None,
        force_close=not reused,
        socket_factory=_watched_socket,
    )


def _watched_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    watched = socket.socket(family=family, type=kind, proto=protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_SECONDS)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_SECONDS)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MILLISECONDS)
    return watched


# Requests -------------------------------------------------------------------------------------------------------------
# One JSON request to one of several servers, without retries after an error: those belong to Temporal.
#
# A request without an answer for long is sent a second time while the first goes on: a connection can fall silent
# without an error, and the time limit must allow for the slowest answers.
#
# Error messages name statuses and error types, and never quote the request.

log = logging.getLogger(__name__)

# Servers are on this or the next machine: a connection that takes longer will not come.
CONNECT_SECONDS = 5.0
# No answer that is asked for is larger; a server that sends more is broken.
ANSWER_LIMIT_BYTES = 8 * 2**20
# A longer Retry-After is cut to this.
MAX_RETRY_AFTER_SECONDS = 600.0
# Nearly all answers of an engine on a GPU come sooner.
LEAST_OVERDUE_SECONDS = 15.0
# An answer is overdue after this many times the slowest of the last answers. With 3 a step came 53 s after a silent
# engine (`make chaos`, seed 115).
OVERDUE_FACTOR = 2.0
# Share of the time limit: a second request that begins later would hardly be answered within the limit.
LATEST_PART = 2 / 3
# Second requests of one client in any `OCCUPIED_SECONDS`. A slow server thus gets more work only little by little; a
# failed network is noticed by the first of them.
SENT_AGAIN_AT_ONCE = 2
# A second request without an answer for so long may be lost, too, and others need not wait for it.
OCCUPIED_SECONDS = 15.0
# An answer, or a request that is wrong or too large. Others are of the moment, of a key, or of one server.
_SAID_OF_THE_REQUEST = frozenset({200, 400, 413, 422})
# An engine that restarted with another model or template within so long breaks a connection, and is asked then.
_KNOWN_SECONDS = 60.0
# vLLM's gauges of its scheduler, one of each for each of its processes.
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^\n]*\})? (?P<count>[\d.e+]+)$", re.MULTILINE)
# An engine that takes longer to say how much it has to do has enough to do.
_BUSY_SECONDS = 5.0
# Until another may be sent again.
_LOOK_SECONDS = 1.0
# The speed of a server ten minutes ago says little about now.
_REMEMBERED_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server with OpenAI's or vLLM's API.

    Args:
        url: without `/v1`.
        model: the model name to ask for.
        api_key: None sends none.
    """

    url: str
    model: str
    api_key: str | None = None


JUDGE_BEHIND = 10
"""Seconds: chats that come so long after a judge's request, or after one of the gate, still precede it."""
PRACTICE_BEHIND = 3600
"""Likewise after a request that nothing waits for."""


def place_in_queue(behind: int = 0) -> dict[str, int]:
    """The place of a request among those that our own engine has yet to compute, as a field of its body.

    vLLM takes the request with the lowest `priority` first: here the time of its coming, in half seconds. So chats go
    first, and what learning asks for waits for a bounded time. Where the cache is full vLLM puts off the request that
    is last. Engines that were started without `--scheduling-policy priority` ignore it (vllm 0.32). No client can set
    it. Those of chats are even, and the others odd, by which `engine_on_cpu` knows them.

    Args:
        behind: seconds in which a chat that comes later still precedes this request.
    """
    return {"priority": 2 * (int(time.time()) + behind) + (behind > 0)}


Endpoints = Callable[[str], Sequence[Endpoint]]
"""The servers of a policy now; may be empty."""


@dataclass(frozen=True, slots=True)
class Reply:
    """
    Args:
        body: None if it is not a JSON object, or larger than `ANSWER_LIMIT_BYTES`.
        too_large: it is larger than `ANSWER_LIMIT_BYTES`.
        retry_after_seconds: of the Retry-After header, bounded; None if there is none that can be read.
        recorded: a gateway of Clawloop answered, which records what it relays.
    """

    status: int
    body: dict[str, Any] | None
    too_large: bool
    retry_after_seconds: float | None
    recorded: bool = False


class NoReply(Exception):
    """No server could be reached, or the one that was did not answer in time."""


def bearer(secret: str | None) -> dict[str, str]:
    """The header that carries a secret; empty if there is none."""
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


class AnswerTimes:
    """Durations of the answers of the last minutes, from which follows when the next one is overdue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (time of the answer, its duration) of answers that no later one exceeds: the slowest is the first.
        self._slowest: deque[tuple[float, float]] = deque()

    def add(self, seconds: float) -> None:
        while self._slowest and self._slowest[-1][1] <= seconds:
            self._slowest.pop()
        self._slowest.append((self._clock(), seconds))

    def overdue_seconds(self, limit: float) -> float | None:
        """Seconds without an answer after which a request is more likely lost than slow.

        Args:
            limit: seconds that an answer may take.

        Returns:
            None: never, since answers take about as long as they may.
        """
        while self._slowest and self._slowest[0][0] < self._clock() - _REMEMBERED_SECONDS:
            self._slowest.popleft()
        slowest = self._slowest[0][1] if self._slowest else 0.0
        latest = LATEST_PART * limit
        return None if slowest >= latest else min(max(LEAST_OVERDUE_SECONDS, OVERDUE_FACTOR * slowest), latest)


class JsonClient:
    """Use as an async context manager. A chat is brought into the order that each server's template takes.

    Args:
        seconds: how long one answer may take.
        with_engines: the servers are engines, which say what their template takes; False: to a server that does not
            say, a chat goes as it is.
    """

    def __init__(self, seconds: float, *, with_engines: bool = True) -> None:
        self._seconds = seconds
        self._with_engines = with_engines
        self._models = ServedModels(_KNOWN_SECONDS)
        self._times = AnswerTimes()
        self._sent_again = 0

    async def __aenter__(self) -> JsonClient:
        limit = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        self._first = aiohttp.ClientSession(timeout=limit, connector=connector())
        # A connection that is idle may have fallen silent, too.
        self._second = aiohttp.ClientSession(timeout=limit, connector=connector(reused=False))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._first.close()
        await self._second.close()

    async def post(self, endpoints: Sequence[Endpoint], path: str, body: dict[str, Any]) -> Reply:
        """The answer of the first of these servers, in random order, that can be reached.

        A request that is overdue is sent once more, to the next of them. The first answer counts, but for refusals that
        say nothing of the other request.

        Raises:
            NoReply
        """
        order = random.sample(list(endpoints), len(endpoints))
        requests = [asyncio.create_task(self._post(self._first, order, path, body))]
        try:
            async with asyncio.timeout(self._seconds):
                if not await self._is_overdue(requests[0]):
                    return await requests[0]
                log.info("a request is overdue and sent again", extra={"path": path})
                others_first = order[1:] + order[:1]
                requests.append(asyncio.create_task(self._post(self._second, others_first, path, body)))
                self._sent_again += 1
                try:
                    await asyncio.wait(requests, timeout=OCCUPIED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._sent_again -= 1
                return await _first_answer(requests)
        except TimeoutError as error:
            for request in requests:
                if request.done() and request.exception() is None:
                    return request.result()  # a refusal
            raise self._too_late() from error
        finally:
            for request in requests:
                request.cancel()  # vLLM stops computing for a connection that was closed
            await asyncio.gather(*requests, return_exceptions=True)

    async def get(self, endpoints: Sequence[Endpoint], path: str) -> Reply:
        """The answer of the first of these servers that can be reached, to a question that takes it no time.

        Raises:
            NoReply
        """
        for endpoint in endpoints:
            try:
                async with self._first.get(f"{endpoint.url}{path}", headers=bearer(endpoint.api_key)) as response:
                    return await _reply(response)
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                continue
        raise NoReply("none can be reached" if endpoints else "there is none")

    async def model_of(self, endpoint: Endpoint) -> ServedModel | None:
        """The model at this address; None if its engine did not say."""
        return await self._models.learn(self._first, endpoint.url, bearer(endpoint.api_key), endpoint.model)

    async def requests_on(self, endpoint: Endpoint) -> int | None:
        """How many requests an engine computes and has waiting, whoever sent them; None if it did not say at once."""
        url, limit = f"{endpoint.url}/metrics", aiohttp.ClientTimeout(total=_BUSY_SECONDS)
        try:
            async with self._first.get(url, headers=bearer(endpoint.api_key), timeout=limit) as response:
                said = await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, ConnectionError, TimeoutError, UnicodeDecodeError):
            return None
        counts = [float(found["count"]) for found in _REQUESTS.finditer(said)]
        return round(sum(counts)) if counts else None

    async def _is_overdue(self, request: asyncio.Task[Reply]) -> bool:
        """Wait until a request is to be sent again; False if it ends before."""
        began = time.monotonic()
        while not request.done():
            overdue_seconds = self._times.overdue_seconds(self._seconds)
            waited = time.monotonic() - began
            if overdue_seconds is None:
                await asyncio.wait([request])
            elif waited < overdue_seconds:
                await asyncio.wait([request], timeout=overdue_seconds - waited)
            elif self._sent_again < SENT_AGAIN_AT_ONCE:
                return True
            else:
                is_late = waited > LATEST_PART * self._seconds
                await asyncio.wait([request], timeout=None if is_late else _LOOK_SECONDS)
        return False

    async def _post(
        self, session: aiohttp.ClientSession, endpoints: Sequence[Endpoint], path: str, body: dict[str, Any]
    ) -> Reply:
        """
        Raises:
            NoReply
        """
        problem = "there is none"
        for endpoint in endpoints:
            headers = {"Content-Type": "application/json"} | bearer(endpoint.api_key)
            if (sent := await self._as_sent(session, endpoint, body)) is None:
                problem = "it did not say which messages its model takes"
                continue
            content = orjson.dumps({"model": endpoint.model} | sent)
            began = time.monotonic()
            try:
                async with session.post(f"{endpoint.url}{path}", data=content, headers=headers) as response:
                    reply = await _reply(response)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._models.forget(endpoint.url)
                problem = "it cannot be reached"
            except TimeoutError as error:
                raise self._too_late() from error
            except (aiohttp.ClientError, ConnectionError) as error:
                self._models.forget(endpoint.url)
                raise NoReply(f"it broke off ({type(error).__name__})") from error
            else:
                if reply.status == 200:
                    self._times.add(time.monotonic() - began)
                return reply
        raise NoReply(problem)

    async def _as_sent(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, body: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The body as the server's template takes it; None if the server did not say."""
        if request_as_sent(body, frozenset(Rule)) is body:
            return body  # every template takes it
        found = await self._models.learn(session, endpoint.url, bearer(endpoint.api_key), endpoint.model)
        if found is None:
            return None if self._with_engines else body
        return request_as_sent(body, found.rules)

    def _too_late(self) -> NoReply:
        return NoReply(f"no answer within {self._seconds:.0f} s")


class Asking:
    """Base of what asks servers by a client of its own. Use as an async context manager."""

    def __init__(self, client: JsonClient) -> None:
        self._client = client

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)


async def _first_answer(requests: Sequence[Awaitable[Reply]]) -> Reply:
    """The first reply that depends on the request alone, or else the last one.

    A server that has enough to do refuses the second request at once, which says nothing of the first.

    Raises:
        NoReply: none of them has a reply.
    """
    refusal, problem = None, NoReply("nothing was sent")
    for request in asyncio.as_completed(requests):
        try:
            reply = await request
        except NoReply as error:
            problem = error
            continue
        if reply.status in _SAID_OF_THE_REQUEST:
            return reply
        refusal = reply
    if refusal is None:
        raise problem
    return refusal


async def _reply(response: aiohttp.ClientResponse) -> Reply:
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > ANSWER_LIMIT_BYTES:
            return Reply(response.status, None, too_large=True, retry_after_seconds=None)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    return Reply(
        response.status,
        body if isinstance(body, dict) else None,
        too_large=False,
        retry_after_seconds=_retry_after(response.headers.get("Retry-After")),
        recorded="X-Clawloop-Version" in response.headers,
    )


def _retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS) if seconds == seconds else None
