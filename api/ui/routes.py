"""The page's routes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.ui import engines, events, lessons, login, now, page, rollouts, sessions, settings, versions
from api.ui.page import PageRoute, viewer
from clawloop.core.errors import RequestRejected

_missing = APIRouter(route_class=PageRoute, include_in_schema=False)


@_missing.get("/ui/{path:path}")
async def no_page(request: Request, path: str) -> Response:
    """Any other address below the page's own."""
    if not path.startswith("assets/"):
        await viewer(request, needs_store=False)
    raise RequestRejected(f"There is no page `/ui/{path}`.", status=404, code="not_found")


_PAGES = (login, now, lessons, events, sessions, versions, rollouts, engines, settings)
ROUTERS: tuple[APIRouter, ...] = (page.assets_router, *(module.router for module in _PAGES), _missing)
