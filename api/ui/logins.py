"""Logins to the page: a signed cookie that every gateway can check, because it is signed from the key's stored hash.

Nothing is stored for a login. It ends when it expires and when its key is revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass

from cachetools import LRUCache
from starlette.datastructures import Headers

from api.auth import KeyRing
from clawloop.core.contracts.answers import StoredKey
from clawloop.core.contracts.serving import ApiKey, Scope
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.operations.keys import KeyStore

COOKIE = "clawloop_page"
# A working day; then the key is asked for again.
LOGIN_SECONDS = 12 * 3600
# Longest time for which a login outlives its key, the same as for a request with the key itself.
FRESH_SECONDS = 30.0
# Keys have 256 random bits, so this bounds the work for PostgreSQL, not the chance to guess one.
FAILURES_PER_MINUTE = 10
_MINUTE = 60.0
_CLIENTS = 10_000  # addresses that are remembered with their attempts
_FORM = re.compile(r"(cl-[0-9a-f]{8})\.(\d{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")
_REJECTED = "This is no key that may see the page: it needs the scope `admin`, or `read` to look only."


@dataclass(frozen=True, slots=True)
class Login:
    """A logged-in viewer of the page.

    Args:
        key: the key that was logged in with.
        may_write: the key has the scope `admin`.
        csrf: token that a form must send back.
        expires: as `time.time`.
    """

    key: ApiKey
    may_write: bool
    csrf: str
    expires: int


class Logins:
    def __init__(self, keys: KeyRing, store: KeyStore) -> None:
        self._keys = keys
        self._store = store
        self._cache: LRUCache[str, tuple[float, StoredKey]] = LRUCache(_CLIENTS)
        self._attempts: LRUCache[str, deque[float]] = LRUCache(_CLIENTS)  # by address: refused, or under way

    async def open(self, secret: str, client: str) -> str:
        """The cookie of a new login.

        Args:
            client: the address that asks, which may fail only so often.

        Raises:
            RequestRejected: 401 for a key that may not see the page, 429 after too many of them.
            StoreUnavailable
        """
        attempt = self._begin_attempt(client)
        try:
            stored = await self._authenticate(secret)
        except StoreUnavailable:
            self._forget_attempt(client, attempt)
            raise
        except (RequestRejected, UnicodeEncodeError):
            raise RequestRejected(_REJECTED, status=401, code="invalid_api_key") from None
        self._forget_attempt(client, attempt)
        fields = f"{_prefix(secret)}.{int(time.time()) + LOGIN_SECONDS}.{secrets.token_hex(16)}"
        return f"{fields}.{_sign(stored, fields)}"

    async def _authenticate(self, secret: str) -> StoredKey:
        """
        Raises:
            RequestRejected, UnicodeEncodeError: the key may not see the page.
            StoreUnavailable
        """
        headers = Headers({"authorization": f"Bearer {secret.strip()}"})
        await self._keys.require(headers, Scope.ADMIN, Scope.READ)
        stored = await self._find(_prefix(secret))
        if stored is None:  # an episode's key, which has no prefix of this form
            raise RequestRejected(_REJECTED, status=401, code="invalid_api_key")
        return stored

    async def find(self, cookie: str | None) -> Login | None:
        """The login of a cookie; None if there is none, or it has ended.

        Raises:
            StoreUnavailable: the login cannot be checked now.
        """
        parts = _FORM.fullmatch(cookie or "")
        if parts is None or int(parts[2]) <= time.time():
            return None
        stored = await self._find(parts[1])
        fields = parts[0].rpartition(".")[0]
        if stored is None or not hmac.compare_digest(_sign(stored, fields), parts[4]):
            return None
        may_write = Scope.ADMIN in stored.key.scopes
        if not may_write and Scope.READ not in stored.key.scopes:
            return None
        return Login(stored.key, may_write, _sign(stored, f"csrf.{fields}"), int(parts[2]))

    async def _find(self, prefix: str) -> StoredKey | None:
        cached = self._cache.get(prefix)
        if cached is not None and time.monotonic() - cached[0] < FRESH_SECONDS:
            return cached[1]
        try:
            stored = await self._store.stored_key(prefix)
        except StoreUnavailable:
            if cached is None:
                raise
            return cached[1]
        if stored is None:
            self._cache.pop(prefix, None)
            return None
        self._cache[prefix] = (time.monotonic(), stored)
        return stored

    def _begin_attempt(self, client: str) -> float:
        """Count an attempt, before its key is looked up: many at once would all pass otherwise.

        Raises:
            RequestRejected: 429
        """
        now = time.monotonic()
        attempts = self._attempts.setdefault(client, deque())
        while attempts and attempts[0] <= now - _MINUTE:
            attempts.popleft()
        if len(attempts) >= FAILURES_PER_MINUTE:
            wait = int(attempts[0] + _MINUTE - now) + 1
            raise RequestRejected(
                f"Too many keys were refused. Wait {wait} s.",
                status=429,
                code="too_many_logins",
                retry_after=str(wait),
            )
        attempts.append(now)
        return now

    def _forget_attempt(self, client: str, attempt: float) -> None:
        attempts = self._attempts.get(client, deque())
        if attempt in attempts:
            attempts.remove(attempt)
        if not attempts:
            self._attempts.pop(client, None)


def _prefix(secret: str) -> str:
    """The public part of a key."""
    return "-".join(secret.strip().split("-")[:2])


def _sign(stored: StoredKey, fields: str) -> str:
    # A key of its own for this purpose: the stored hash signs nothing else.
    key = hmac.digest(stored.secret_sha256, b"clawloop page", hashlib.sha256)
    return hmac.new(key, fields.encode(), hashlib.sha256).hexdigest()
