"""The gateway's FastAPI application: its routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from api import feedback, health
from api.admin import engines, erasure, history, judging, rollouts, sessions, training
from api.chat import models, route
from api.chat.schemas import ChatRequest
from api.dependencies import Services
from api.errors import install_error_handlers
from api.middleware import HostAndOriginCheck, RequestMetrics
from api.ui.routes import ROUTERS

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
    for module in (route, feedback, models, health, engines, sessions, judging, history, erasure, training, rollouts):
        app.include_router(module.router)
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(HostAndOriginCheck, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestMetrics)
    _add_chat_schema(app)
    return app


def _add_chat_schema(app: FastAPI) -> None:
    """Add the chat request to the OpenAPI description: the chat route parses its body itself, so FastAPI does not."""
    describe = app.openapi

    def with_chat_schema() -> dict[str, Any]:
        description = describe()
        schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions = schema.pop("$defs", {})
        description.setdefault("components", {}).setdefault("schemas", {}).update(definitions | {"ChatRequest": schema})
        return description

    app.openapi = with_chat_schema  # type: ignore[method-assign]
