"""The health port of a worker, which is served before Temporal answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.local.checks import choose_port
from clawloop.app.processes.worker_process import run_workers


async def _no_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
    raise AssertionError("Temporal answers on a port where nothing listens")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    port, nothing = (choose_port(name, "127.0.0.1", 0, "") for name in ("health", "Temporal"))
    registry = CollectorRegistry()
    Counter("secrets", "told to nobody", registry=registry)
    working = asyncio.create_task(run_workers("test", f"127.0.0.1:{nothing}", _no_workers, port, registry=registry))
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        while True:
            try:
                await client.get(f"http://127.0.0.1:{port}/healthz")
                break
            except httpx.TransportError:
                assert not working.done(), working.result()
                await asyncio.sleep(0.05)
    yield port
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "10.1.2.3:8081", "[::1]:9"])
async def test_addresses_and_loopback_names_are_answered(port: int, host: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"Host": host}) as client:
        assert "secrets_total" in (await client.get("/metrics")).text
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503


@pytest.mark.parametrize(
    "host", ["rebound.example", "127.0.0.1.rebound.example:8081", "", "localhost@rebound.example", "["]
)
async def test_other_names_are_not_answered(port: int, host: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"Host": host}) as client:
        for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
            refused = await client.get(path)
            assert (refused.status_code, "secrets" in refused.text) == (421, False)


async def test_one_host_is_named(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: rebound.example\r\nConnection: close\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    assert answer.split()[1] in ("400", "421")
    assert "secrets" not in answer
