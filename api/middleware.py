"""ASGI middleware: a check of Host and Origin, and a count of chat requests."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.dependencies import Services
from api.errors import CLIENT_CLOSED_REQUEST, to_problem
from clawloop.errors import RequestRejected
from clawloop.host_names import hostname, ip_address, is_allowed, is_answered

_CHAT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})


class HostAndOriginCheck:
    """Refuses requests to host names that are not allowed, and writes from pages of other origins.

    See `clawloop.host_names` for why.

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
