"""The gateway's FastAPI application: its routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from api import feedback, health, openapi
from api.admin import keys, rollouts, sessions, system, training
from api.chat import models, routes
from api.dependencies import Services
from api.errors import install_error_handlers
from api.middleware import HostAndOriginCheck, RequestIds, RequestMetrics
from api.openapi import describe
from api.request_body import BodyRoom
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
    modules = (routes, feedback, models, health, openapi, sessions, keys, system, training, rollouts)
    routers = [module.router for module in modules]
    routers += [sessions.judging_router, system.ledger_router, rollouts.worker_router]
    for router in (*routers, *ROUTERS):
        # As they are: `include_router` would make each route, and the schemas of its parameters, a second time.
        app.router.routes.extend(router.routes)
    install_error_handlers(app)
    app.add_middleware(BodyRoom)
    app.add_middleware(HostAndOriginCheck, allowed_hosts=allowed_hosts)
    app.add_middleware(RequestMetrics)
    app.add_middleware(RequestIds)
    describe(app)
    return app
