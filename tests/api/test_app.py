"""The routes of the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.routing import Route

from api.app import create_app
from api.dependencies import Services


@asynccontextmanager
async def never_opened() -> AsyncIterator[Services]:
    raise AssertionError("the server was started")
    yield


def test_no_page_loads_scripts_from_another_site() -> None:
    paths = {route.path for route in create_app(never_opened).routes if isinstance(route, Route)}
    assert "/openapi.json" in paths
    assert {"/docs", "/redoc"}.isdisjoint(paths)
