"""The gateway's FastAPI application: its routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from api import feedback, health
from api.admin import (
    engines,
    erasure,
    export,
    history,
    judging,
    key_limits,
    keys,
    ledger,
    probes,
    rollouts,
    sessions,
    training,
)
from api.chat import completions, messages, models, responses, route
from api.chat.completions import CompletionRequest
from api.chat.schemas import ChatRequest
from api.dependencies import Services
from api.errors import install_error_handlers
from api.middleware import HostAndOriginCheck, RequestMetrics
from api.request_identity import RequestIds
from api.ui.routes import ROUTERS
from api.wire.messages_request import CountTokensRequest, MessagesRequest
from api.wire.responses_request import ResponsesRequest

MakeServices = Callable[[], AbstractAsyncContextManager[Services]]


def create_app(make_services: MakeServices, allowed_hosts: frozenset[str] = frozenset()) -> FastAPI:
    """The application.

    Args:
        make_services: opened when the server starts, closed after the last turn is stored.
        allowed_hosts: host names to answer to, besides loopback names and IP addresses.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with make_services() as services:
            app.state.services = services
            yield
            await services.finish()

    app = FastAPI(title="Clawloop", lifespan=lifespan, openapi_url="/openapi.json", docs_url=None, redoc_url=None)
    chat = (route, completions, messages, responses)
    admin = (export, key_limits, engines, sessions, judging, history, erasure, training, rollouts, probes, keys, ledger)
    for module in (*chat, feedback, models, health, *admin):
        app.include_router(module.router)
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(HostAndOriginCheck, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestMetrics)
    app.add_middleware(RequestIds)
    _add_chat_schema(app)
    return app


def _add_chat_schema(app: FastAPI) -> None:
    """Add the chat requests to the OpenAPI description: their routes parse their bodies, so FastAPI does not."""
    describe = app.openapi

    def with_chat_schema() -> dict[str, Any]:
        description = describe()
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for request in (ChatRequest, CompletionRequest, MessagesRequest, CountTokensRequest, ResponsesRequest):
            schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {request.__name__: schema}
        return description

    app.openapi = with_chat_schema  # type: ignore[method-assign]
