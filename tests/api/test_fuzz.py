"""Requests made from the OpenAPI description: no 500, and every error in its shape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine


class _Beside(threading.Thread):
    """A gateway on an event loop of its own, for a client that blocks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.ready = threading.Event()
        self.gateway: Gateway | None = None
        self._stop_it: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        stop = asyncio.Event()
        self._stop_it = (asyncio.get_running_loop(), stop)
        async with fake_engine() as engine, running_gateway(self.folder, engines=[engine]) as self.gateway:
            self.ready.set()
            await stop.wait()

    def end(self) -> None:
        assert self._stop_it is not None
        loop, stop = self._stop_it
        loop.call_soon_threadsafe(stop.set)
        self.join()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    thread = _Beside(tmp_path_factory.mktemp("fuzz"))
    thread.start()
    assert thread.ready.wait(10)
    assert thread.gateway is not None
    yield thread.gateway
    thread.end()


OPERATIONS = (
    ("/v1/chat/completions", "POST"),
    ("/v1/models", "GET"),
    ("/admin/v1/engines", "GET"),
    ("/healthz", "GET"),
    ("/readyz", "GET"),
    ("/metrics", "GET"),
)


def test_every_operation_is_fuzzed(beside: Gateway) -> None:
    described = schemathesis.openapi.from_url(f"{beside.url}/openapi.json")
    known = {(operation.ok().path, operation.ok().method.upper()) for operation in described.get_all_operations()}
    assert known == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_makes_a_500(beside: Gateway, path: str, method: str) -> None:
    operation = schemathesis.openapi.from_url(f"{beside.url}/openapi.json")[path][method]
    key = beside.admin_key if path.startswith("/admin") else beside.key

    @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)))
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def check(case: schemathesis.Case) -> None:
        response = case.call(headers={"Authorization": f"Bearer {key}"})
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400 and path.startswith("/v1"):
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
