"""One JSON request to one of several servers, without retries: those belong to Temporal.

Error messages name statuses and error types, and never quote the request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson

# Servers are on this or the next machine: a connection that takes longer will not come.
CONNECT_SECONDS = 5.0
# No answer that is asked for is larger; a server that sends more is broken.
ANSWER_LIMIT_BYTES = 8 * 2**20
# A longer Retry-After is cut to this.
MAX_RETRY_AFTER_SECONDS = 600.0


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


class JsonClient:
    """Use as an async context manager.

    Args:
        seconds: how long one answer may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> JsonClient:
        limit = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, endpoints: Sequence[Endpoint], path: str, body: dict[str, Any]) -> Reply:
        """The answer of the first of these servers, in random order, that can be reached.

        Raises:
            NoReply
        """
        assert self._session is not None, "used outside its context"
        problem = "there is none"
        for endpoint in random.sample(list(endpoints), len(endpoints)):
            headers = {"Content-Type": "application/json"} | bearer(endpoint.api_key)
            content = orjson.dumps({"model": endpoint.model} | body)
            try:
                async with self._session.post(f"{endpoint.url}{path}", data=content, headers=headers) as response:
                    return await _reply(response)
            except aiohttp.ClientConnectorError:
                problem = "it cannot be reached"
            except TimeoutError as error:
                raise NoReply(f"no answer within {self._seconds:.0f} s") from error
            except (aiohttp.ClientError, ConnectionError) as error:
                raise NoReply(f"it broke off ({type(error).__name__})") from error
        raise NoReply(problem)


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
