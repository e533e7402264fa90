"""Request bodies as JSON objects: bounded in memory, size and time."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from hashlib import sha256
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import secret_of
from api.dependencies import Limits
from api.json_bounds import DEPTH_LIMIT, is_too_deep
from clawloop.core.errors import RequestRejected

# Memory of all bodies -------------------------------------------------------------------------------------------------
# Bounds the memory of request bodies: of one client, and of all at once.
#
# Each body is bounded by itself, but a client may send many at the same time, and let each wait in its middle.

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


# Reading a body -------------------------------------------------------------------------------------------------------
# Request bodies as JSON objects, limited in size, time and depth.

# Half a character: a surrogate that is none of a pair, or one written as UTF-8. Each begins with what is sought fast.
_HALF = re.compile(
    rb"""\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])
    |(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})""",
    re.VERBOSE,
)
_HALF_UTF8 = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_UNREADABLE = "\ufffd".encode()
_MASK = b"\0"
# A body over the limit is read and discarded up to this, so that the client is there to read the answer.
_DISCARD_BYTES = 128 * 1024 * 1024


async def read_json(request: Request, limits: Limits, *, optional: bool = False) -> dict[str, Any]:
    """The request's body as a JSON object.

    Args:
        optional: no body is an empty object.

    Raises:
        RequestRejected: too large (413), too slow (408), not JSON, not an object, or nested too deeply (400).
        ClientDisconnect: the client closed the connection.
    """
    raw = await read_body(request, limits)
    if optional and not raw:
        return {}
    _require_simple(raw, limits.chat.json_values)
    try:
        body = _parsed(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRejected(
            f"The body is not JSON: {error.msg} at byte {error.pos}. Send a JSON object in UTF-8.",
            code="invalid_json",
        ) from None
    if not isinstance(body, dict):
        raise RequestRejected("The body must be a JSON object.", code="invalid_json")
    # Without as many brackets it cannot be too deep, and need not be written.
    if raw.count(b"{") + raw.count(b"[") > DEPTH_LIMIT and is_too_deep(body):
        raise RequestRejected(
            f"The body is nested too deeply: at most {DEPTH_LIMIT} levels are accepted.",
            code="invalid_json",
        )
    return body


def _parsed(raw: bytes) -> Any:
    """The JSON; halves of a character become the sign for one that cannot be read, as clients cut texts within one.

    Raises:
        orjson.JSONDecodeError
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        if _MASK in raw:  # which JSON does not have
            raise
        # Escaped backslashes are masked, so that one before `u` begins an escape.
        whole = _HALF.sub(_UNREADABLE, raw.replace(rb"\\", _MASK)).replace(_MASK, rb"\\")
        whole = _HALF_UTF8.sub(_UNREADABLE, whole)
        if whole == raw:
            raise
        return orjson.loads(whole)


def _require_simple(raw: bytes, most: int) -> None:
    """
    Raises:
        RequestRejected: 400; an empty list of three bytes takes 70 of memory, and some ns in each loop over it.
    """
    # Signs in texts count as well: a long one in which each tenth character is a comma has 4 million tokens.
    signs = sum(map(raw.count, (b",", b"[", b"{")))
    if signs > most:
        raise RequestRejected(
            f"The body has {signs} commas and opening brackets, at most {most} are accepted. Send less history.",
            code="request_too_complex",
        )


async def read_body(request: Request, limits: Limits) -> bytes:
    """The request's body.

    Raises:
        RequestRejected: too large (413) or too slow (408).
        ClientDisconnect: the client closed the connection.
    """
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for chunk in request.stream():
                size_bytes += len(chunk)
                if size_bytes <= limits.body_bytes:
                    chunks.append(chunk)
                elif size_bytes > _DISCARD_BYTES:
                    break
                else:
                    chunks.clear()
    except TimeoutError:
        raise RequestRejected(
            f"The body did not arrive within {limits.upload_seconds:.0f} s. Send less history, or smaller files.",
            status=408,
            code="upload_timeout",
        ) from None
    if size_bytes > limits.body_bytes:
        raise RequestRejected(
            f"The body is larger than {_size(limits.body_bytes)}. Send less history, or smaller files.",
            status=413,
            code="body_too_large",
        )
    return b"".join(chunks)


def _size(size_bytes: int) -> str:
    mib = size_bytes // 2**20
    return f"{mib} MiB" if mib else f"{size_bytes // 2**10} KiB"


# Bodies of admin requests ---------------------------------------------------------------------------------------------
# Bodies of admin requests: read once the key is checked, and refused with the field and what it takes.


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


Body = TypeVar("Body", bound=RequestBody)


def described(model: type[RequestBody], *, required: bool = True) -> dict[str, Any]:
    """The body for the OpenAPI description, of a route that reads its body itself."""
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"required": required, "content": {"application/json": schema}}}


def check(model: type[Body], body: dict[str, Any]) -> Body:
    """
    Raises:
        RequestRejected: 400, naming the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        takes = ", ".join(f"`{name}`" for name in model.model_fields)
        raise RequestRejected(
            f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}. This takes {takes}.",
            code="missing_required_parameter" if first["type"] == "missing" else "invalid_value",
            field=field,
        ) from None
