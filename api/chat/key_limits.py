"""Limits of each key (requests and tokens a minute, chats at once, stored bytes), and the metering of use."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from cachetools import LRUCache
from starlette.types import Message, Send

from api.chat.capture import Chunk
from api.errors import Problem
from clawloop.core.contracts.serving import ApiKey
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.core.ids import ApiKeyId
from clawloop.operations.keys import KeyStore

# Stored bytes ---------------------------------------------------------------------------------------------------------
# Stored bytes of the keys with a limit on them, read from PostgreSQL every few seconds, so that no chat waits.
#
# A key may exceed its limit by the bytes that it stores within one interval. While PostgreSQL does not answer, the
# last answer counts; the spool has a limit of its own.

log = logging.getLogger(__name__)

# A key that stores 1 MB a second, which is far more than one engine writes, goes 10 MB over.
REFRESH_SECONDS = 10.0
# Others are not asked about: keys come and go.
_RECENT_SECONDS = 60.0
# A changed limit is read within 30 s, and room that was made is seen 10 s later.
_RETRY_SECONDS = 60
_MIB = 2**20


class StoredBytes:
    """Use as an async context manager: inside it the counts are refreshed.

    Args:
        default_mib: for keys without a limit of their own; None: no limit.
    """

    def __init__(self, counts: KeyStore, default_mib: int | None = None) -> None:
        self._counts = counts
        self._default_mib = default_mib
        self._seen: dict[ApiKeyId, float] = {}
        self._stored: dict[ApiKeyId, int] = {}
        self._new_key = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StoredBytes:
        self._task = asyncio.create_task(self._refresh_again_and_again())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def require_room(self, key: ApiKey) -> None:
        """
        Raises:
            RequestRejected: 429; the key had stored its limit when PostgreSQL was last asked.
        """
        most = key.limits.stored_mib or self._default_mib
        if most is None or key.episode is not None:
            return
        if key.id not in self._seen:
            self._new_key.set()
        self._seen[key.id] = time.monotonic()
        if self._stored.get(key.id, 0) >= most * _MIB:
            raise RequestRejected(
                f"This key has stored its limit of {most} MiB of conversations. An operator makes room by"
                " `clawloop erase`, or raises the limit: `clawloop key limit --stored-mib`.",
                status=429,
                code="storage_limit_exceeded",
                retry_after=str(_RETRY_SECONDS),
            )

    async def refresh(self) -> None:
        """
        Raises:
            StoreUnavailable
        """
        recent = time.monotonic() - _RECENT_SECONDS
        self._seen = {key: seen for key, seen in self._seen.items() if seen > recent}
        self._stored = await self._counts.stored_bytes(list(self._seen)) if self._seen else {}

    async def _refresh_again_and_again(self) -> None:
        while True:
            self._new_key.clear()
            try:
                await self.refresh()
            except StoreUnavailable as error:
                log.warning("what keys store is not known", extra={"why": str(error)})
                await asyncio.sleep(REFRESH_SECONDS)
                continue
            except Exception:  # a bug; the task must go on, or no key would reach its bound any more
                log.exception("what keys store is not known")
                await asyncio.sleep(REFRESH_SECONDS)
                continue
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._new_key.wait()
            except TimeoutError:
                pass


# Limits ---------------------------------------------------------------------------------------------------------------
# Limits of each key, by leaky buckets in this process: requests and tokens a minute, chats at once, stored bytes.
#
# Each of several gateways that know each other counts by itself and grants its share, so that no chat waits for
# another process. Connections are spread evenly over them by the kernel, so a busy key gets about its limit, and one
# that sends few requests may be refused a little early.

_MINUTE = 60.0
# Two small buckets are 500 bytes; keys that sent nothing for longest are forgotten, and begin with full ones.
_KEYS = 10_000
# A chat ends within seconds or minutes: the client should look again soon, and not at once.
_CONCURRENCY_RETRY_SECONDS = 2
# A request to count tokens waits this long for its key's earlier ones; each takes a second or two at most.
COUNT_SECONDS = 30.0


class Bucket:
    """Holds a minute's worth; refills steadily. It may be emptied below zero, and then takes longer.

    Args:
        limit: a minute's worth, of all gateways.
        gateways: how many share it.
    """

    def __init__(self, limit: int, gateways: int, now: float) -> None:
        self.limit = limit
        self.size = max(1.0, limit / gateways)
        self._level = self.size
        self._filled_at = now

    def level(self, now: float) -> float:
        self._level = min(self.size, self._level + (now - self._filled_at) * self.size / _MINUTE)
        self._filled_at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, wanted: float, now: float) -> float:
        return max(0.0, (wanted - self.level(now)) * _MINUTE / self.size)


class Pace:
    """Tokens a second of recent replies, the time before the first token included."""

    # Weight of the newest reply in the running mean: about the last ten replies count.
    _SHARE = 0.1

    def __init__(self) -> None:
        self._tokens_a_second: float | None = None

    def take(self, tokens: float, seconds: float) -> None:
        newest = tokens / max(seconds, 0.001)
        known = self._tokens_a_second
        self._tokens_a_second = newest if known is None else known + self._SHARE * (newest - known)

    def tokens_in(self, seconds: float) -> int:
        """Approximate number of tokens of a reply after `seconds`; 0 until the first reply has ended."""
        return int((self._tokens_a_second or 0.0) * seconds)


@dataclass(slots=True)
class _Key:
    requests: Bucket | None = None
    tokens: Bucket | None = None
    in_flight: int = 0


class KeyLimiter:
    """
    Args:
        gateways: processes that share each limit.
        clock: seconds that only grow.
        stored: None bounds no stored bytes.

    Attributes:
        pace: of the replies of this process, whichever key's.
    """

    def __init__(
        self,
        gateways: int = 1,
        clock: Callable[[], float] = time.monotonic,
        stored: StoredBytes | None = None,
    ) -> None:
        self.pace = Pace()
        self._stored = stored
        self._gateways = gateways
        self._clock = clock
        self._keys: LRUCache[ApiKeyId, _Key] = LRUCache(_KEYS)
        self._counting: LRUCache[ApiKeyId, asyncio.Lock] = LRUCache(_KEYS)

    @contextmanager
    def admit(self, key: ApiKey) -> Iterator[None]:
        """One chat of this key.

        Raises:
            RequestRejected: 429; the key has used what it may.
        """
        self.require_room(key)
        state = self._state(key)
        if state is None:
            yield
            return
        self._require(state)
        most = key.limits.concurrency
        if most is not None and state.in_flight >= max(1, math.ceil(most / self._gateways)):
            raise _exceeded(f"use {most} chats at once", _CONCURRENCY_RETRY_SECONDS)
        self._take_request(state)
        state.in_flight += 1
        try:
            yield
        finally:
            state.in_flight -= 1

    @asynccontextmanager
    async def admit_count(self, key: ApiKey) -> AsyncIterator[None]:
        """One request to count tokens, while no other of this key is counted: an engine counts for one after the other.

        Raises:
            RequestRejected: 429; the key has used what it may, or many of its own are before this one.
        """
        counting = self._counting.setdefault(key.id, asyncio.Lock())
        try:
            async with asyncio.timeout(COUNT_SECONDS):
                await counting.acquire()
        except TimeoutError:
            raise _exceeded("count the tokens of one request at a time", _CONCURRENCY_RETRY_SECONDS) from None
        try:
            if (state := self._state(key)) is not None:
                self._require(state)
                self._take_request(state)
            yield
        finally:
            counting.release()

    def require_room(self, key: ApiKey) -> None:
        """
        Raises:
            RequestRejected: 429; the key has stored its limit.
        """
        if self._stored is not None:
            self._stored.require_room(key)

    def charge(self, key: ApiKey, tokens: int) -> None:
        """Count the tokens of a chat, which are known at its end."""
        state = self._state(key)
        if state is not None and state.tokens is not None:
            state.tokens.take(tokens, self._clock())

    def headers(self, key: ApiKey) -> dict[str, str]:
        """OpenAI's rate-limit headers; empty for a key without limits a minute."""
        state = self._state(key)
        found: dict[str, str] = {}
        for name, bucket in (("requests", state and state.requests), ("tokens", state and state.tokens)):
            if bucket:
                now = self._clock()
                left = math.floor(max(0.0, bucket.level(now)) * bucket.limit / bucket.size)
                found[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(left)
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.size, now):.3f}s"
        return found

    def _take_request(self, state: _Key) -> None:
        if state.requests is not None:
            state.requests.take(1, self._clock())

    def _require(self, state: _Key) -> None:
        now = self._clock()
        for name, bucket, wanted in (("requests", state.requests, 1.0), ("tokens", state.tokens, 0.0)):
            if bucket is not None and bucket.level(now) < wanted:
                wait = max(1, math.ceil(bucket.seconds_until(wanted, now)))
                raise _exceeded(f"use {bucket.limit} {name} a minute", wait)

    def _state(self, key: ApiKey) -> _Key | None:
        limits = key.limits
        if limits.requests_per_minute is limits.tokens_per_minute is limits.concurrency is None:
            return None
        state = self._keys.setdefault(key.id, _Key())
        state.requests = self._bucket(state.requests, limits.requests_per_minute)
        state.tokens = self._bucket(state.tokens, limits.tokens_per_minute)
        return state

    def _bucket(self, bucket: Bucket | None, limit: int | None) -> Bucket | None:
        """The bucket for this limit: the given one if its limit is unchanged, else a new one; None without a limit."""
        if limit is None or (bucket is not None and bucket.limit == limit):
            return None if limit is None else bucket
        return Bucket(limit, self._gateways, self._clock())


def _exceeded(limit: str, wait_seconds: int) -> RequestRejected:
    return RequestRejected(
        f"This key may {limit}. Try again in {wait_seconds} s; an operator sets limits with `clawloop key limit`.",
        status=429,
        code="rate_limit_exceeded",
        retry_after=str(wait_seconds),
    )


# Tokens ---------------------------------------------------------------------------------------------------------------
# Counts the tokens that engines generated for one request, whatever becomes of them.
#
# A turn records fewer tokens: those of broken attempts and of inconsistent chunks are dropped.

# Typical of English text and of code; used only for a prompt whose tokens the engine had no time to report.
_BYTES_PER_TOKEN = 4


class TokenMeter:
    """
    Args:
        choices: of the request.
        most: tokens that a choice may have, as far as the client says; None: unknown.
    """

    def __init__(self, choices: int, most: int | None) -> None:
        self._choices = choices
        self._most = most
        self._earlier = 0  # of attempts before this one
        self._prompt = 0
        self._response = 0
        self._reported = 0
        self._body_bytes = 0
        self._sent_at: float | None = None

    def begin(self) -> None:
        """Begin another attempt: tokens of the earlier ones stay counted."""
        self._earlier += self._counted()
        self._prompt = self._response = self._reported = 0
        self._sent_at = None

    def sending(self, body_bytes: int) -> None:
        """An engine is about to get the request."""
        self._body_bytes = body_bytes
        self._sent_at = time.monotonic()

    def take(self, chunk: Chunk, chat: Chunk) -> None:
        """Count a chunk of a stream, or a whole answer, before anything is removed from it.

        Args:
            chunk: as the engine sent it.
            chat: the same as a chat chunk.

        Raises:
            AttributeError, LookupError, TypeError: it is not a chat chunk.
        """
        prompt = chat.get("prompt_token_ids")
        if isinstance(prompt, list):
            self._prompt = len(prompt)
        for choice in chat["choices"]:
            ids = choice.get("token_ids")
            # Without ids at least one token for each part that says something.
            self._response += len(ids) if isinstance(ids, list) else int(_says_something(choice.get("delta") or {}))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._reported = max(self._reported, _whole(usage.get("total_tokens")))

    def total(self) -> int:
        """Tokens of prompts and replies, as far as the engines have said."""
        return self._earlier + self._counted()

    def total_of_cut(self, pace: Pace) -> int:
        """Tokens of a request whose client left, estimated if the engine has worked without an answer so far."""
        if self._sent_at is None or self._counted():
            return self.total()
        each = pace.tokens_in(time.monotonic() - self._sent_at)
        response = self._choices * (each if self._most is None else min(each, self._most))
        return self._earlier + self._body_bytes // _BYTES_PER_TOKEN + response

    def set_pace(self, pace: Pace) -> None:
        """Record in `pace` the engine's speed with this request, which has ended."""
        if self._sent_at is not None and self._response:
            pace.take(self._response / self._choices, time.monotonic() - self._sent_at)

    def _counted(self) -> int:
        return max(self._prompt + self._response, self._reported)


def _says_something(delta: Chunk) -> bool:
    return any(value for name, value in delta.items() if name != "role")


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# Waiting for the client -----------------------------------------------------------------------------------------------
# Bounds on the time that a reply waits for its client to read it.
#
# Meanwhile the request keeps its places on the engine. A client that reads a little now and then never hangs, so the
# sum of the waits is bounded too.

# A client that reads nothing for this long sleeps or hangs.
STALL_SECONDS = 60.0


class ClientReading:
    """
    Args:
        blocked_seconds: how long a reply may wait for its client in all.
    """

    def __init__(self, blocked_seconds: float) -> None:
        self._most = blocked_seconds
        self._blocked = 0.0
        self._since: float | None = None

    def timed(self, send: Send) -> Send:
        """`send`, counting how long it waits for the client to read."""

        async def timed(message: Message) -> None:
            self._since = time.monotonic()
            await send(message)
            self._blocked += time.monotonic() - self._since
            self._since = None

        return timed

    def stalls(self) -> bool:
        """The client has read nothing for `STALL_SECONDS`."""
        return self._waiting() > STALL_SECONDS

    def is_too_slow(self) -> bool:
        """The reply has waited for longer than it may."""
        return self._blocked + self._waiting() > self._most

    def too_slow(self) -> Problem:
        """The error for a client that reads too slowly."""
        message = (
            f"The reply was cut: it waited for {self._most:g} s in all for this client to read it, and kept "
            "others from the engine meanwhile. Read faster, or ask for less at once; an operator sets the bound with "
            "`CLAWLOOP_CHAT_BOUNDS__BLOCKED_SECONDS`."
        )
        return Problem(408, message, "client_too_slow")

    def _waiting(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since
