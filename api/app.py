"""The gateway's FastAPI application: its routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from api import docs, feedback, health
from api.admin import (
    comparison,
    engines,
    environment_workers,
    erasure,
    export,
    files,
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
from api.body_room import BodyRoom
from api.chat import completions, messages, models, responses, route
from api.dependencies import Services
from api.errors import install_error_handlers
from api.middleware import HostAndOriginCheck, RequestMetrics
from api.openapi import describe
from api.request_identity import RequestIds
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

    app = FastAPI(title="Clawloop", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    chat = (route, completions, messages, responses)
    recorded = (export, sessions, files, judging, history, erasure)
    admin = (key_limits, engines, training, comparison, rollouts, environment_workers, probes, keys, ledger)
    for module in (*chat, feedback, models, health, docs, *recorded, *admin):
        app.include_router(module.router)
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(BodyRoom)
    app.add_middleware(HostAndOriginCheck, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestMetrics)
    app.add_middleware(RequestIds)
    describe(app)
    return app
