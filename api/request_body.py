"""Request bodies as JSON objects, limited in size, time and depth."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from starlette.requests import Request

from api.dependencies import Limits
from api.json_depth import DEPTH_LIMIT, is_too_deep
from clawloop.errors import RequestRejected

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
