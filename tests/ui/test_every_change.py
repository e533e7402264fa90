"""Every route of the page that changes something wants the login's token and the scope `admin`; a new one, too."""

from __future__ import annotations

import re
from uuid import uuid4

from fastapi.routing import APIRoute

from api.ui.routes import ROUTERS
from tests.ui.conftest import Page

# Whoever may look may log in and out.
_OF_VIEWERS = {"/ui/login", "/ui/logout"}


def changes() -> list[str]:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    paths = {route.path for route in routes if route.methods - {"GET", "HEAD"}} - _OF_VIEWERS
    return sorted(re.sub(r"\{\w+\}", str(uuid4()), path) for path in paths)


async def test_without_the_token_of_the_login_nothing_is_changed(page: Page) -> None:
    async with page.visitor() as visitor:
        visitor.csrf = "0" * 64
        refused = {path: (await visitor.post(path)).status_code for path in changes()}
    assert len(refused) > 15
    assert {path: status for path, status in refused.items() if status != 403} == {}


async def test_with_the_scope_read_nothing_is_changed(page: Page) -> None:
    async with page.visitor(page.read_key) as visitor:
        refused = {path: (await visitor.post(path)).status_code for path in changes()}
    assert {path: status for path, status in refused.items() if status != 403} == {}
