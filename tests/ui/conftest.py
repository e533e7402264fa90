"""The page on a real gateway's services and a real PostgreSQL, with a fake engine; without Temporal."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from api.dependencies import Services
from api.http_protocol import BoundedHttpProtocol
from clawloop.app.processes.gateway import GatewayOptions, gateway_services
from clawloop.core.contracts.serving import Scope
from clawloop.core.settings import Settings
from db.database import Database
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from tests.api.conftest import until
from tests.contract.learning import POLICY, PostgresLearning
from tests.fakes.engine import FakeEngine, fake_engine, serving
from tests.ui.recorded import Recorder

PATIENT = timedelta(seconds=20)  # a busy machine must not fail a test


@dataclass
class Page:
    """
    Attributes:
        services: of the newest gateway.
        draining: set it to have the gateway drain.
    """

    url: str
    database_url: str
    admin_key: str
    read_key: str
    recorder: Recorder
    engine: FakeEngine
    services: list[Services] = field(default_factory=list)
    draining: list[bool] = field(default_factory=list)

    @property
    def learning(self) -> PostgresLearning:
        return self.recorder.learning

    @asynccontextmanager
    async def visitor(self, key: str | None = None) -> AsyncIterator[Visitor]:
        """Somebody who is logged in."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            visitor = Visitor(client)
            await visitor.log_in(key or self.admin_key)
            yield visitor


@dataclass
class Visitor:
    client: httpx.AsyncClient
    csrf: str = ""

    async def log_in(self, key: str) -> httpx.Response:
        token = re.search(r'name="token" value="([^"]+)"', (await self.client.get("/ui/login")).text)
        assert token is not None
        answer = await self.client.post("/ui/login", data={"token": token[1], "key": key})
        if answer.status_code == 303:
            page = await self.client.get("/ui/versions")
            found = re.search(r"X-CSRF-Token&#34;: &#34;([0-9a-f]{64})", page.text) or re.search(
                r'"X-CSRF-Token": "([0-9a-f]{64})"', page.text
            )
            assert found is not None, page.text
            self.csrf = found[1]
        return answer

    async def get(self, path: str) -> str:
        answer = await self.client.get(path)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.text

    async def post(self, path: str, **fields: str) -> httpx.Response:
        return await self.client.post(path, data=fields, headers={"X-CSRF-Token": self.csrf, "HX-Request": "true"})


@pytest.fixture
async def page(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Page]:
    for limit in ("CHAT_LIMIT", "PAGE_LIMIT"):
        monkeypatch.setattr(f"clawloop.app.processes.gateway.{limit}", PATIENT)
    async with AsyncExitStack() as stack:
        database = Database(postgres_url, PATIENT)
        stack.push_async_callback(database.close)
        learning = await PostgresLearning.on(postgres_url, database)
        keys = PostgresKeyStore(database)
        _, admin = await keys.create_key(POLICY, {Scope.ADMIN}, "admin")
        _, read = await keys.create_key(POLICY, {Scope.READ}, "read")
        engine = await stack.enter_async_context(fake_engine())
        await add_engine(database, engine.url)
        running = await stack.enter_async_context(_serving(postgres_url, tmp_path))
        running.admin_key, running.read_key = admin, read
        running.recorder, running.engine = Recorder(learning), engine
        # An engine takes nothing until its first probe.
        await until(running.services[0].engines.healthy)
        yield running


@asynccontextmanager
async def _serving(url: str, folder: Path) -> AsyncIterator[Page]:
    settings = Settings.model_validate({"DATABASE_URL": url, "data": folder})
    draining: list[bool] = []
    created: list[Services] = []

    @asynccontextmanager
    async def services() -> AsyncIterator[Services]:
        async with AsyncExitStack() as stack:
            with socket.socket() as listener:
                options = GatewayOptions(listener=listener)
                created.append(await gateway_services(stack, url, settings, options, lambda: bool(draining)))
            yield created[0]

    async with serving(create_app(services), http=BoundedHttpProtocol) as address:
        page = Page.__new__(Page)
        page.url, page.database_url, page.services, page.draining = address, url, created, draining
        yield page
