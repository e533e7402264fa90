"""Steps of every request before its route: its id, a check of Host and Origin, and a count of chats."""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.dependencies import Services
from api.errors import CLIENT_CLOSED_REQUEST, to_problem
from clawloop.core.errors import RequestRejected
from clawloop.core.host_names import hostname, ip_address, is_allowed, is_answered

# Ids of requests ------------------------------------------------------------------------------------------------------
# Identity of a request: its id, in every answer and log line, and the trace it belongs to.

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


# Middleware -----------------------------------------------------------------------------------------------------------
# ASGI middleware: a check of Host and Origin, and a count of chat requests.

_CHAT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})


class HostAndOriginCheck:
    """Refuses requests to host names that are not allowed, and writes from pages of other origins.

    See `clawloop.core.host_names` for why.

    Args:
        allowed_hosts: host names to answer to; `*` allows all. IP addresses and loopback names are always allowed.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check(scope["method"], headers)
            except RequestRejected as error:
                await to_problem(error).response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        if len(headers.getlist("host")) > 1:
            # A proxy may have validated a different Host header than the one checked here.
            raise RequestRejected("The request has more than one Host header. Send one.", code="invalid_http")
        host = hostname(f"//{headers.get('host', '')}")
        if not is_answered(host, self._allowed):
            raise RequestRejected(
                f"This gateway does not answer to the host {host!r}. Allow it with `--allowed-host`.",
                status=421,
                code="host_not_allowed",
            )
        if method in {"GET", "HEAD", "OPTIONS"} or "origin" not in headers:
            return
        origin = hostname(headers["origin"])
        address = ip_address(origin)
        if (
            not is_allowed(origin, self._allowed)
            and origin != host
            and not (address is not None and address.is_loopback)
        ):
            raise RequestRejected(
                f"Pages of {headers['origin']!r} may not write to this gateway. Allow it with `--allowed-host`.",
                status=403,
                code="origin_not_allowed",
            )


class RequestMetrics:
    """Counts chat requests by the status of their answer, whichever layer gave it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _CHAT_PATHS:
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            services = scope["app"].state.services
            assert isinstance(services, Services)
            services.metrics.requests.labels(str(status)).inc()
