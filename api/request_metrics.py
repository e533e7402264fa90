"""Counts chat requests by the status they were answered with, wherever it was decided."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.dependencies import Services

_CHAT = "/v1/chat/completions"
# nginx's word for a client that left before it was answered.
_LEFT = 499


class RequestMetrics:
    """ASGI middleware; the services are those of the app, once it has started."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != _CHAT:
            await self._app(scope, receive, send)
            return
        status = _LEFT

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            services = scope["app"].state.services
            assert isinstance(services, Services)
            services.metrics.requests.labels(str(status)).inc()
