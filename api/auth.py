"""API keys of requests, cached so that chat goes on while PostgreSQL is away.

A key of an episode is signed, so that one that was never looked up is accepted as well while PostgreSQL is away. No key
is accepted after it has expired.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from datetime import UTC, datetime

from cachetools import LRUCache
from starlette.datastructures import Headers

from clawloop.core.contracts.serving import ApiKey, Scope
from clawloop.core.episodes.keys import is_episode_key, verify
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.core.ids import ApiKeyId
from clawloop.operations.keys import KeyStore

log = logging.getLogger(__name__)

# Longest time for which a revoked key is still accepted.
FRESH_SECONDS = 30.0
# After a failed look-up a cached key is used this long without another look-up.
STALE_SECONDS = 5.0
# A request with an uncached key waits this long for PostgreSQL, which is only slow in a burst on a busy machine.
RETRY_SECONDS = 5.0
_RETRY_INTERVAL_SECONDS = 0.2
# Most look-ups of uncached keys at once: clients that try made-up keys must leave connections to the chats.
_LOOKUPS = 4
# A cached key stays valid while PostgreSQL is away; this bounds the memory, not the time.
CACHE_SIZE = 10_000


class KeyRing:
    """Authorizes requests by their key. Used as an async context manager it also reads by itself the secret that signs
    keys of episodes, now and again: otherwise it could check none in an outage before its first episode, and would
    accept those of a secret that was replaced.

    Args:
        store: where keys are looked up.
        retry_seconds: how long the first request with a key may wait for the store.
    """

    def __init__(self, store: KeyStore, retry_seconds: float = RETRY_SECONDS) -> None:
        self._store = store
        self._retry_seconds = retry_seconds
        self._cache: LRUCache[bytes, tuple[float, ApiKey]] = LRUCache(CACHE_SIZE)
        self._lookups: dict[bytes, asyncio.Task[ApiKey | None]] = {}
        self._signing_secret: bytes | None = None
        self._signing_secret_read_at = 0.0
        self._free_lookups = asyncio.BoundedSemaphore(_LOOKUPS)
        self._keeping_fresh: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KeyRing:
        self._keeping_fresh = asyncio.create_task(self._keep_fresh())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeping_fresh is not None:
            self._keeping_fresh.cancel()
            await asyncio.wait([self._keeping_fresh])

    async def require(self, headers: Headers, *scopes: Scope) -> ApiKey:
        """The key of this request, which has one of the scopes.

        Raises:
            RequestRejected: 401 without a valid key, 403 without one of the scopes.
            StoreUnavailable: the key is not cached and cannot be looked up now.
        """
        secret = secret_of(headers)
        key = await self._find(secret)
        if key is None:
            raise RequestRejected(
                "The API key is not known here, was revoked, has expired, or belonged to an episode that has ended. "
                "`clawloop key list` shows the keys; `clawloop key create` makes one.",
                status=401,
                code="invalid_api_key",
            )
        if key.scopes.isdisjoint(scopes):
            wanted, held = " or ".join(scopes), ", ".join(sorted(key.scopes))
            raise RequestRejected(
                f"This request needs a key with the scope {wanted}; this key has {held}.",
                status=403,
                code="insufficient_scope",
            )
        return key

    async def _find(self, secret: str) -> ApiKey | None:
        # The secret itself stays in memory no longer than the request.
        digest = hashlib.sha256(secret.encode()).digest()
        cached = self._cache.get(digest)
        if cached is not None and _has_expired(cached[1]):
            del self._cache[digest]
            return None
        if cached is not None and time.monotonic() - cached[0] < FRESH_SECONDS:
            return cached[1]
        try:
            key = await self._look_up(digest, secret)
        except StoreUnavailable:
            known = self._signed_key(secret) if cached is None else cached[1]
            if known is None:
                raise
            # Requests of the next seconds need not wait for the same failure.
            self._cache[digest] = (time.monotonic() - FRESH_SECONDS + STALE_SECONDS, known)
            return known
        if key is None or _has_expired(key):
            self._cache.pop(digest, None)
            return None
        self._cache[digest] = (time.monotonic(), key)
        return key

    def _signed_key(self, secret: str) -> ApiKey | None:
        """The policy and episode of a genuine episode key that has not expired; None for any other key.

        Only PostgreSQL knows if the episode ended early.
        """
        signed = None if self._signing_secret is None else verify(secret, self._signing_secret)
        if signed is None:
            return None
        key = ApiKey(
            ApiKeyId(signed.episode), signed.policy, frozenset({Scope.CHAT}), signed.episode, signed.expires_at
        )
        return None if _has_expired(key) else key

    async def _look_up(self, digest: bytes, secret: str) -> ApiKey | None:
        """Look a key up, once for all requests that wait for it.

        A client that begins with many requests at once would otherwise take every connection, and on a busy machine
        none of the look-ups would finish in time.
        """
        if (lookup := self._lookups.get(digest)) is None:
            known = digest in self._cache or self._signed_key(secret) is not None
            authenticating = self._authenticate(secret, 0.0) if known else self._authenticate_unknown(secret)
            lookup = self._lookups[digest] = asyncio.create_task(authenticating)
            lookup.add_done_callback(lambda task: self._forget_lookup(digest, task))
        return await asyncio.shield(lookup)  # a client that disconnects must not cancel the look-up of the others

    async def _authenticate_unknown(self, secret: str) -> ApiKey | None:
        until = time.monotonic() + self._retry_seconds
        try:
            async with asyncio.timeout(self._retry_seconds):
                await self._free_lookups.acquire()
        except TimeoutError:
            raise StoreUnavailable("too many keys are being looked up") from None
        try:
            return await self._authenticate(secret, until - time.monotonic())
        finally:
            self._free_lookups.release()

    async def _authenticate(self, secret: str, retry_seconds: float) -> ApiKey | None:
        until = time.monotonic() + retry_seconds
        while True:
            try:
                if is_episode_key(secret):
                    await self._read_signing_secret()
                return await self._store.authenticate(secret)
            except StoreUnavailable:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(_RETRY_INTERVAL_SECONDS)

    async def _keep_fresh(self) -> None:
        while True:
            try:
                await self._read_signing_secret()
            except StoreUnavailable:
                pass
            except Exception:  # a bug; the task must go on, or a replaced secret would never be seen
                log.exception("signing secret not read")
            await asyncio.sleep(FRESH_SECONDS)

    async def _read_signing_secret(self) -> None:
        """Read it again now and then: an operator may have replaced it."""
        now = time.monotonic()
        if self._signing_secret is None or now - self._signing_secret_read_at >= FRESH_SECONDS:
            self._signing_secret = await self._store.signing_secret()
            self._signing_secret_read_at = now

    def _forget_lookup(self, digest: bytes, task: asyncio.Task[ApiKey | None]) -> None:
        del self._lookups[digest]
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it when all its requests are gone


def _has_expired(key: ApiKey) -> bool:
    return key.expires_at is not None and key.expires_at <= datetime.now(UTC)


def secret_of(headers: Headers) -> str:
    """The API key that a request was sent with, in whichever of the two headers.

    Raises:
        RequestRejected: 401; neither header has one.
    """
    value = headers.get("authorization", "")
    kind, _, secret = value.partition(" ")
    # Anthropic's clients send their key so, and some send both.
    if kind.lower() != "bearer" and (other := headers.get("x-api-key", "").strip()):
        return other
    if not value:
        message = "No API key was sent. Send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`."
    elif kind.lower() != "bearer" or not secret.strip():
        message = "The Authorization header must read `Bearer KEY`."
    else:
        return secret.strip()
    raise RequestRejected(message, status=401, code="invalid_api_key")
