"""The gateway's web application: routes, error shapes, the edge. Knows nothing about what stands behind its ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api import errors, feedback, health
from api.admin import erasure, judging, sessions, training
from api.chat import models, route
from api.chat.schemas import ChatRequest
from api.dependencies import Services
from api.middleware import HostAndOriginCheck
from api.request_metrics import RequestMetrics

MakeServices = Callable[[], AbstractAsyncContextManager[Services]]


def create_app(make_services: MakeServices, allowed_hosts: frozenset[str] = frozenset()) -> FastAPI:
    """The application.

    Args:
        make_services: opened when the server starts, closed after the last turn is stored.
        allowed_hosts: names under which the gateway may be addressed, beside loopback and addresses.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with make_services() as services:
            app.state.services = services
            yield
            await services.finish()

    app = FastAPI(title="Clawloop", lifespan=lifespan, openapi_url="/openapi.json", docs_url=None, redoc_url=None)
    for router in (
        route.router,
        feedback.router,
        models.router,
        health.router,
        sessions.router,
        judging.router,
        erasure.router,
        training.router,
    ):
        app.include_router(router)
    errors.install(app)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    app.add_middleware(HostAndOriginCheck, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestMetrics)
    _describe_chat(app)
    return app


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _describe_chat(app: FastAPI) -> None:
    """The chat route reads its body itself, so its schema is added to the description by hand."""
    describe = app.openapi

    def with_chat() -> dict[str, Any]:
        description = describe()
        schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions = schema.pop("$defs", {})
        description.setdefault("components", {}).setdefault("schemas", {}).update(definitions | {"ChatRequest": schema})
        return description

    app.openapi = with_chat  # type: ignore[method-assign]
