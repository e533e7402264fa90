"""Limits of each key, by leaky buckets in this process: requests and tokens a minute, chats at once, stored bytes.

Each of several gateways that know each other counts by itself and grants its share, so that no chat waits for another
process. Connections are spread evenly over them by the kernel, so a busy key gets about its limit, and one that sends
few requests may be refused a little early.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from cachetools import LRUCache

from api.chat.stored_bytes import StoredBytes
from clawloop.contracts.serving import ApiKey
from clawloop.errors import RequestRejected
from clawloop.ids import ApiKeyId

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
        """The same bucket, unless an operator has changed its limit."""
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
