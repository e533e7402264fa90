"""The edge of the gateway: which hosts and origins may speak to it, and how much they may send.

Knows nothing about chats. A page in a browser must not reach a loopback gateway through a name of its own (DNS
rebinding), nor write to it from another origin; addresses need no such care, names do.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.dependencies import Limits
from api.errors import problem_of
from clawloop.errors import RequestRejected

LOOPBACK_NAMES = frozenset({"localhost"})
# What is stored wraps the request in a few more levels, and pydantic reads a spooled turn up to about 200. Nobody's
# tool schema is this deep. orjson writes at most 254: that is how the depth is looked at without walking through it.
_DEPTH_LIMIT = 128
_SPARE_LEVELS = 254 - _DEPTH_LIMIT
# A refused upload is read and thrown away up to this, so that the client is there to read the answer.
_DISCARD_BYTES = 128 * 1024 * 1024


class HostAndOriginCheck:
    """ASGI middleware.

    Args:
        allowed_hosts: names that may be addressed; `*` allows all. Addresses and loopback names always may.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed_hosts | LOOPBACK_NAMES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check(scope["method"], headers)
            except RequestRejected as error:
                await problem_of(error).response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        host = _name(f"//{headers.get('host', '')}")
        if not self._known(host) and _address(host) is None:
            raise RequestRejected(
                f"This gateway does not answer to the host {host!r}. Allow it with `--allowed-host`.",
                status=421,
                code="host_not_allowed",
            )
        if method in {"GET", "HEAD", "OPTIONS"} or "origin" not in headers:
            return
        origin = _name(headers["origin"])
        address = _address(origin)
        if not self._known(origin) and origin != host and not (address is not None and address.is_loopback):
            raise RequestRejected(
                f"Pages of {headers['origin']!r} may not write to this gateway. Allow it with `--allowed-host`.",
                status=403,
                code="origin_not_allowed",
            )

    def _known(self, name: str | None) -> bool:
        return name is not None and ("*" in self._allowed or name in self._allowed)


def _address(name: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name or "")
    except ValueError:
        return None


def _name(url: str) -> str | None:
    """The host in a URL, lower-case; None if it holds none or cannot be read."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises:
        RequestRejected: too large (413), too slow (408), no JSON, no object, or nested too deeply (400).
        ClientDisconnect: nobody is there to be answered.
    """
    raw = await _read(request, limits)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRejected(
            f"The body is not JSON: {error.msg} at byte {error.pos}. Send a JSON object in UTF-8.",
            code="invalid_json",
        ) from None
    if not isinstance(body, dict):
        raise RequestRejected("The body must be a JSON object with `model` and `messages`.", code="invalid_json")
    wrapped: Any = body
    for _ in range(_SPARE_LEVELS):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except orjson.JSONEncodeError:
        raise RequestRejected(
            f"The body is nested too deeply: at most {_DEPTH_LIMIT} levels are read.",
            code="invalid_json",
        ) from None
    return body


async def _read(request: Request, limits: Limits) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limits.body_bytes:
                    chunks.append(chunk)
                elif size > _DISCARD_BYTES:
                    break
                else:
                    chunks.clear()
    except TimeoutError:
        raise RequestRejected(
            f"The body did not arrive within {limits.upload_seconds:.0f} s.",
            status=408,
            code="upload_timeout",
        ) from None
    if size > limits.body_bytes:
        raise RequestRejected(
            f"The body is larger than {limits.body_bytes // (1024 * 1024)} MiB. Send less history, or smaller files.",
            status=413,
            code="body_too_large",
        )
    return b"".join(chunks)
