"""Bounds the memory of request bodies: of one client, and of all at once.

Each body is bounded by itself, but a client may send many at the same time, and let each wait in its middle.
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import secret_of
from clawloop.errors import RequestRejected

# Parsed, a body takes a few times as much. Twenty people's agents with whole contexts of a million tokens are 80 MiB.
TOTAL_BYTES = 256 * 2**20
# Three of the largest bodies; OpenClaw's have 35 KB.
SHARE_BYTES = 96 * 2**20
_RETRY_SECONDS = 5


class BodyRoom:
    """ASGI middleware: a body that would exceed a bound is refused with 429 while it is read.

    Args:
        total_bytes: of all requests that are being answered.
        share_bytes: of those with one key; all without a key are one client.
    """

    def __init__(self, app: ASGIApp, total_bytes: int = TOTAL_BYTES, share_bytes: int = SHARE_BYTES) -> None:
        self._app = app
        self._total_bytes = total_bytes
        self._share_bytes = share_bytes
        self._held: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client, taken = _client(Headers(scope=scope)), 0

        async def receive_counted() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            self._take(client, size)
            taken += size
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held[client] -= taken
            if not self._held[client]:
                del self._held[client]

    def _take(self, client: bytes, size: int) -> None:
        """
        Raises:
            RequestRejected: 429
        """
        for held, most in ((self._held[client], self._share_bytes), (self._held.total(), self._total_bytes)):
            if size and held + size > most:
                raise RequestRejected(
                    f"The bodies of requests that are being answered exceed {most // 2**20} MiB. Send fewer at once.",
                    status=429,
                    code="too_many_large_requests",
                    retry_after=str(_RETRY_SECONDS),
                )
        self._held[client] += size


def _client(headers: Headers) -> bytes:
    """A hash that identifies the client; the secret itself is not kept.

    Only of the key, as authorization reads it: one key can be written in many ways, beside headers that are not read.
    """
    try:
        secret = secret_of(headers)
    except RequestRejected:
        secret = ""
    return sha256(secret.encode()).digest()
