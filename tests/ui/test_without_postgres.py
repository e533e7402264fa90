"""Every route of the gateway while PostgreSQL takes no writes, and while it takes no connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import psycopg
import pytest
from fastapi.routing import APIRoute

from api.openapi import REQUEST_EXAMPLES
from api.ui.routes import ROUTERS
from clawloop.core.contracts.serving import Scope
from db.serving.keys import PostgresKeyStore
from tests.conftest import database_address
from tests.contract.learning import POLICY
from tests.ui.conftest import Page, Visitor

pytestmark = pytest.mark.slow  # each route twice

# Of what a browser keeps open, and of the login itself.
_LEFT_OUT = {"/ui/events", "/ui/login", "/ui/logout"}
_CHATS = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
_FORM = {"version": "0", "reason": "x", "name": "n", "scope": "chat", "policy": POLICY, "rating": "up", "score": "1"}


class Server:
    """PostgreSQL's administrator; undoes at the end what it did to the database."""

    def __init__(self, url: str) -> None:
        self._name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self._connection = psycopg.connect(database_address(url, "postgres"), autocommit=True)

    def takes_no_writes(self) -> None:
        self._alter("SET default_transaction_read_only = on")

    def takes_no_connections(self) -> None:
        self._alter("ALLOW_CONNECTIONS false")

    def close(self) -> None:
        self._alter("RESET default_transaction_read_only")
        self._alter("ALLOW_CONNECTIONS true")
        self._connection.close()

    def _alter(self, how: str) -> None:
        self._connection.execute(f"ALTER DATABASE {self._name} {how}".encode())
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        self._connection.execute(ended, [self._name])


@pytest.fixture
async def server(page: Page) -> AsyncIterator[Server]:
    server = Server(page.database_url)
    yield server
    server.close()


async def _statuses(page: Page, visitor: Visitor, chat_key: str, known: dict[str, str]) -> dict[tuple[str, str], int]:
    """The status of each route, by method and path."""
    statuses: dict[tuple[str, str], int] = {}

    def filled(path: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: known.get(name[1], str(uuid4())), path)

    async with httpx.AsyncClient(base_url=page.url, timeout=60) as client:
        for path, operations in (await client.get("/openapi.json")).json()["paths"].items():
            for method in map(str.upper, operations):
                key = page.admin_key if path.startswith("/admin") else chat_key
                body = REQUEST_EXAMPLES.get(f"{method} {path}", {} if method in ("POST", "PUT") else None)
                answer = await client.request(
                    method,
                    filled(path),
                    json=body,
                    params={"session_id": "s1", "turn": 0} if path == "/v1/feedback" and method == "GET" else {},
                    headers={"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"},
                )
                statuses[method, path] = answer.status_code
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.path not in _LEFT_OUT:
            (method,) = route.methods
            if method == "GET":
                answer = await visitor.client.get(filled(route.path), params={"records": "turns"})
            else:
                answer = await visitor.post(filled(route.path), **_FORM)
            statuses[method, route.path] = answer.status_code
    return statuses


async def test_each_route_answers_and_what_only_reads_reads_on(page: Page, server: Server) -> None:
    [turn] = await page.recorder.chat("s1", "Hello")
    _, chat_key = await PostgresKeyStore(page.learning.database).create_key(POLICY, {Scope.CHAT}, "chat")
    prefix = "-".join(page.admin_key.split("-")[:2])
    known = {"policy": POLICY, "turn": str(turn), "version": "0", "prefix": prefix, "model": "policy"}
    async with page.visitor() as visitor:
        visitor.client.headers["HX-Request"] = "true"
        for path in ("/v1/models", "/admin/v1/status"):  # keys that the gateway knows
            for key in (chat_key, page.admin_key):
                await visitor.client.get(path, headers={"Authorization": f"Bearer {key}"})
        server.takes_no_writes()
        async with asyncio.timeout(60):  # until the page has noticed that its connections were ended
            while (await visitor.client.get("/ui/now")).status_code != 200:
                await asyncio.sleep(0.1)
        read_only = await _statuses(page, visitor, chat_key, known)
        server.takes_no_connections()
        away = await _statuses(page, visitor, chat_key, known)
    assert len(away) > 100
    for statuses in (read_only, away):
        assert {route for route, status in statuses.items() if status >= 500 and status != 503} == set()
        assert {statuses["POST", path] for path in _CHATS} == {200}
    reads = {path: status for (method, path), status in read_only.items() if method == "GET" and path != "/readyz"}
    assert [path for path, status in reads.items() if status == 503] == []
