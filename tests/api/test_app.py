"""The routes of the application."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.routing import Route

from api.app import create_app
from api.dependencies import Services
from tests.api.conftest import Gateway

ASSETS = Path(__file__).resolve().parents[2] / "api" / "docs_assets"


@asynccontextmanager
async def never_opened() -> AsyncIterator[Services]:
    raise AssertionError("the server was started")
    yield


def test_frameworks_own_pages_which_load_scripts_from_another_site_are_off() -> None:
    paths = {route.path for route in create_app(never_opened).routes if isinstance(route, Route)}
    assert {"/openapi.json", "/docs"} <= paths
    assert "/redoc" not in paths


async def test_the_docs_load_files_of_this_package_alone(gateway: Gateway) -> None:
    async with gateway.client() as client:
        page = await client.get("/docs", headers={"Authorization": ""})
        assert "script-src 'self'; style-src 'self';" in page.headers["content-security-policy"]
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(loaded) == 4
        for address in loaded:
            assert address == "data:," or (await client.get(address)).status_code == 200
        assert "<script>" not in page.text
        assert (await client.get("/docs/..%2fdocs.py")).status_code == 404
        assert (await client.get("/docs/README.md")).status_code == 404


def test_the_docs_assets_are_those_of_their_package() -> None:
    for line in (ASSETS / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
        assert name in (ASSETS / "README.md").read_text()
