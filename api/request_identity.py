"""Identity of a request: its id, in every answer and log line, and the trace it belongs to."""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Characters that a log line and a header can carry. A longer text is no id.
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# The bound that W3C's Trace Context asks of everyone to pass on.
_STATE_LENGTH = 512
_STATE_KEY = "request_id"


class RequestIds:
    """ASGI middleware: each answer has the request's own `X-Request-Id`, or a new one if it had none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req_{uuid4().hex}"
        scope.setdefault("state", {})[_STATE_KEY] = name
        headers = [(b"x-request-id", name.encode())]
        if scope["path"].startswith("/v1/messages"):
            headers.append((b"request-id", name.encode()))  # where Anthropic's clients look

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), *headers]}  # type: ignore[operator]
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(scope: Scope) -> str | None:
    """The id that the middleware gave the request; None without it."""
    name = scope.get("state", {}).get(_STATE_KEY)
    return name if isinstance(name, str) else None


def trace_headers(headers: Headers) -> dict[str, str]:
    """The headers by which an engine joins the client's trace (W3C Trace Context); empty without a valid one."""
    parent = headers.get("traceparent", "").strip()
    if not _TRACE_PARENT.fullmatch(parent):
        return {}
    state = headers.get("tracestate", "").strip()
    usable = state.isascii() and state.isprintable() and 0 < len(state) <= _STATE_LENGTH
    return {"traceparent": parent} | ({"tracestate": state} if usable else {})
