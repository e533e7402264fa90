"""One JSON request to one of several servers, without retries: those belong to Temporal.

A request that may be lost is sent a second time while the first is awaited: a connection can fall silent without an
error, and its time limit is that of the slowest answers.

Error messages name statuses and error types, and never quote the request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson

from clawloop.serving.connections import connector

log = logging.getLogger(__name__)

# Servers are on this or the next machine: a connection that takes longer will not come.
CONNECT_SECONDS = 5.0
# No answer that is asked for is larger; a server that sends more is broken.
ANSWER_LIMIT_BYTES = 8 * 2**20
# A longer Retry-After is cut to this.
MAX_RETRY_AFTER_SECONDS = 600.0
# Nearly all answers of an engine on a GPU come sooner; a second request in vain costs little.
LEAST_OVERDUE_SECONDS = 15.0
# Prompts differ by this much in time; a machine without a GPU whose answers all take a minute is asked once.
OVERDUE_FACTOR = 3.0
# Answers whose time is remembered: of some minutes.
_REMEMBERED = 64


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


BEFORE_CHATS = {"priority": -1}
"""In a request to an engine of ours: it precedes those of chats, which have 0 and may not say otherwise.

Engines that were started without `--scheduling-policy priority` ignore it (vllm 0.32)."""

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
    """How long the last answers took, which tells when the next is overdue."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def overdue_seconds(self) -> float:
        """After this many seconds without an answer a request is more likely lost than slow."""
        return max([LEAST_OVERDUE_SECONDS, *(OVERDUE_FACTOR * seconds for seconds in self._seconds)])


class JsonClient:
    """Use as an async context manager.

    A request that is overdue is sent once more, and the first answer counts.

    Args:
        seconds: how long one answer may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._times = AnswerTimes()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> JsonClient:
        limit = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        # A connection that is idle may have fallen silent. A new one takes little beside an answer.
        self._session = aiohttp.ClientSession(timeout=limit, connector=connector(keep_seconds=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, endpoints: Sequence[Endpoint], path: str, body: dict[str, Any]) -> Reply:
        """The answer of the first of these servers, in random order, that can be reached.

        Raises:
            NoReply
        """
        overdue_seconds = self._times.overdue_seconds()
        requests = {asyncio.create_task(self._post(endpoints, path, body))}
        try:
            async with asyncio.timeout(self._seconds):
                answered, _ = await asyncio.wait(requests, timeout=overdue_seconds)
                if not answered:
                    log.info("a request is overdue, sent again", extra={"path": path, "seconds": overdue_seconds})
                    requests.add(asyncio.create_task(self._post(endpoints, path, body)))
                return await _first_reply(requests)
        except TimeoutError as error:
            raise self._too_late() from error
        finally:
            for request in requests:
                request.cancel()  # an engine stops computing for a connection that was closed
            await asyncio.gather(*requests, return_exceptions=True)

    async def _post(self, endpoints: Sequence[Endpoint], path: str, body: dict[str, Any]) -> Reply:
        """
        Raises:
            NoReply
        """
        assert self._session is not None, "used outside its context"
        began, problem = time.monotonic(), "there is none"
        for endpoint in random.sample(list(endpoints), len(endpoints)):
            headers = {"Content-Type": "application/json"} | bearer(endpoint.api_key)
            content = orjson.dumps({"model": endpoint.model} | body)
            try:
                async with self._session.post(f"{endpoint.url}{path}", data=content, headers=headers) as response:
                    reply = await _reply(response)
                    self._times.add(time.monotonic() - began)
                    return reply
            except aiohttp.ClientConnectorError:
                problem = "it cannot be reached"
            except TimeoutError as error:
                raise self._too_late() from error
            except (aiohttp.ClientError, ConnectionError) as error:
                raise NoReply(f"it broke off ({type(error).__name__})") from error
        raise NoReply(problem)

    def _too_late(self) -> NoReply:
        return NoReply(f"no answer within {self._seconds:.0f} s")


async def _first_reply(requests: Iterable[Awaitable[Reply]]) -> Reply:
    """
    Raises:
        NoReply: why the last of them got none.
    """
    problem = NoReply("nothing was sent")
    for request in asyncio.as_completed(requests):
        try:
            return await request
        except NoReply as error:
            problem = error
    raise problem


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
