"""Who may ask what: keys, remembered for a while so that a chat goes on while Postgres is away.

Knows nothing about how keys are stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict

from starlette.datastructures import Headers

from api.ports import KeyStore
from clawloop.contracts.serving import ApiKey, Scope
from clawloop.errors import RequestRejected, StoreUnavailable

# How long a revoked key may still work.
FRESH_SECONDS = 30.0
# After a failed look-up the remembered key is good this long without another.
AWAY_SECONDS = 5.0
# How long a request with a key we do not remember waits for Postgres: in a burst on a busy machine it is only late.
PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
# While Postgres is away a key that was good goes on being good; this bounds the memory, not the time.
REMEMBERED = 10_000


class KeyRing:
    """Checks bearer keys.

    Args:
        store: where keys are looked up.
        patience_seconds: how long the first request with a key may wait for the store.
    """

    def __init__(self, store: KeyStore, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._store = store
        self._patience_seconds = patience_seconds
        self._known: OrderedDict[bytes, tuple[float, ApiKey]] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[ApiKey | None]] = {}

    async def require(self, headers: Headers, scope: Scope) -> ApiKey:
        """The key of this request.

        Raises:
            RequestRejected: 401 without a good key, 403 without the scope.
            StoreUnavailable: a key we do not remember cannot be looked up now.
        """
        secret = _bearer(headers)
        key = await self._find(secret)
        if key is None:
            raise RequestRejected(
                "The API key is not known here, or was revoked. `clawloop key list` shows the keys; "
                "`clawloop key create` makes one.",
                status=401,
                code="invalid_api_key",
            )
        if scope not in key.scopes:
            raise RequestRejected(
                f"This key may not do that: it has the scopes {', '.join(sorted(key.scopes))}, not {scope}.",
                status=403,
                code="insufficient_scope",
            )
        return key

    async def _find(self, secret: str) -> ApiKey | None:
        # The secret itself is not kept in memory longer than the request.
        digest = hashlib.sha256(secret.encode()).digest()
        remembered = self._known.get(digest)
        if remembered is not None and time.monotonic() - remembered[0] < FRESH_SECONDS:
            return remembered[1]
        try:
            key = await self._look_up(digest, secret)
        except StoreUnavailable:
            if remembered is None:
                raise
            # Postgres is silent: the next chats need not wait to hear that again.
            self._known[digest] = (time.monotonic() - FRESH_SECONDS + AWAY_SECONDS, remembered[1])
            return remembered[1]
        if key is None:
            self._known.pop(digest, None)
            return None
        self._known[digest] = (time.monotonic(), key)
        self._known.move_to_end(digest)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return key

    async def _look_up(self, digest: bytes, secret: str) -> ApiKey | None:
        """Ask the store, once for all requests that wait for the same key.

        A client that begins with many requests at once would otherwise take every connection, and on a busy machine
        none of them would be answered in time.
        """
        if (asked := self._asked.get(digest)) is None:
            patience = 0.0 if digest in self._known else self._patience_seconds
            asked = self._asked[digest] = asyncio.create_task(self._authenticate(secret, patience))
            asked.add_done_callback(lambda task: self._answered(digest, task))
        return await asyncio.shield(asked)  # a client that leaves takes nobody's answer with it

    async def _authenticate(self, secret: str, patience_seconds: float) -> ApiKey | None:
        until = time.monotonic() + patience_seconds
        while True:
            try:
                return await self._store.authenticate(secret)
            except StoreUnavailable:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    def _answered(self, digest: bytes, task: asyncio.Task[ApiKey | None]) -> None:
        del self._asked[digest]
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report what nobody waits for any more


def _bearer(headers: Headers) -> str:
    value = headers.get("authorization", "")
    kind, _, secret = value.partition(" ")
    if not value:
        message = "No API key was sent. Send the header `Authorization: Bearer KEY`."
    elif kind.lower() != "bearer" or not secret.strip():
        message = "The Authorization header must read `Bearer KEY`."
    else:
        return secret.strip()
    raise RequestRejected(message, status=401, code="invalid_api_key")
