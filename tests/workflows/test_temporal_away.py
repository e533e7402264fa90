"""Temporal stops under a running gateway: chat goes on, and its turns are judged when Temporal is back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
from temporalio.client import Client
from temporalio.service import RPCError

from activities.sweep import SweepActivities
from clawloop.app.local.checks import choose_port
from clawloop.app.local.services import temporal_server
from clawloop.app.processes.bootstrap import prepare
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import register_search_attributes
from clawloop.core.ids import turn_id_of
from db.sweep import PostgresSweepStore
from tests.chaos.proxy import Proxy
from tests.e2e.gateway import RealGateway, running_gateway
from tests.fakes.engine import fake_engine
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE
from tests.workflows.test_whole import at_work, end

__all__ = ["bench", "binary_bench", "judge"]


class Server:
    """A development server of the test's own, that can be ended and started again on its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = temporal_server.Ports(*(choose_port("Temporal", temporal_server.HOST, 0, "") for _ in range(3)))
        self.address = f"{temporal_server.HOST}:{self.ports.main}"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        started = temporal_server.launch(self.folder, self.ports, os.environ)
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(started.command, env=dict(started.environment), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(60)

    async def ready(self) -> Client:
        client = await self.answers()
        await register_search_attributes(client)
        return client

    async def answers(self) -> Client:
        """As `ready`, with nothing prepared."""
        async with asyncio.timeout(60):
            while not await temporal_server.is_ready(self.ports.http):
                await asyncio.sleep(0.1)
        return await connect(self.address)

    def lose_data(self) -> None:
        """While it does not run."""
        for file in self.folder.glob("temporal.db*"):
            file.unlink()


async def say(gateway: RealGateway, messages: list[dict[str, str]], text: str, *, done: bool = False) -> str:
    messages.append({"role": "user", "content": text})
    async with gateway.client(timeout=60) as client:
        body = {"model": "policy", "messages": messages, "session_id": "away", "session_done": done}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    # Each reply is the same; the user's next words keep the turns apart.
    messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    response: str = answer.json()["id"]
    return response


async def test_chat_goes_on_and_is_judged_when_temporal_is_back(binary_bench: Bench, tmp_path: Path) -> None:
    b = binary_bench
    server = Server(tmp_path)
    async with fake_engine() as engine:
        keys = await prepare(b.url, "tiny", [], [engine.url], {})
        with server.running() as process:
            await server.ready()
            async with running_gateway(b.url, keys, tmp_path / "data", TEMPORAL_ADDRESS=server.address) as gateway:
                messages: list[dict[str, str]] = []
                said = [await say(gateway, messages, "one")]
                async with asyncio.timeout(30):
                    while (await gateway.turn(said[0])).announced_at is None:
                        await asyncio.sleep(0.1)
                process.send_signal(signal.SIGSTOP)
                said.append(await say(gateway, messages, "two"))
                process.send_signal(signal.SIGCONT)
                process.terminate()
                await asyncio.to_thread(process.wait, 60)
                said += [await say(gateway, messages, "three"), await say(gateway, messages, "four", done=True)]
                assert (await gateway.turn(said[-1])).announced_at is None
        with server.running():
            client = await server.ready()
            sweeper = SweepActivities(
                PostgresSweepStore(b.database), TemporalNotifier(client, IDLE), b.work, IDLE, timedelta(0)
            )
            async with at_work(client, b):
                assert (await sweeper.sweep()).turns >= 2
                session = (await gateway.turn(said[0])).session_id
                await end(client, session)
    turns = [await b.turn(turn_id) for reply in said if (turn_id := turn_id_of(reply)) is not None]
    assert [turn.outcome for turn in turns] == ["sampled", "sampled", "sampled", "no_feedback"]
    assert all(turn.announced_at is not None for turn in turns)
    assert b.rows("SELECT state FROM sessions") == [{"state": "closed"}]


async def test_a_silent_connection_is_replaced_before_a_step_is_a_minute_late(temporal_address: str) -> None:
    async with Proxy(int(temporal_address.rpartition(":")[2]), choose_port("the proxy", "127.0.0.1", 0, "")) as proxy:
        client = await connect(f"127.0.0.1:{proxy.port}")
        assert await client.service_client.check_health()
        proxy.silence()
        silent_since = time.monotonic()
        async with asyncio.timeout(60):
            while not await _answers(client):
                pass
    # The SDK's default takes 45 s.
    assert time.monotonic() - silent_since < 35


async def _answers(client: Client) -> bool:
    try:
        return await client.service_client.check_health(retry=True)
    except RPCError:
        return False


async def test_a_worker_serves_its_metrics(temporal_address: str, binary_bench: Bench, tmp_path: Path) -> None:
    port = choose_port("the worker", "127.0.0.1", 0, "")
    command = [sys.executable, "-m", "clawloop.app.cli.main", "worker", "judge", "--health-port", str(port)]
    settings = {"DATABASE_URL": binary_bench.url, "TEMPORAL_ADDRESS": temporal_address, "CLAWLOOP_DATA": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, env=dict(os.environ) | settings, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            async with asyncio.timeout(240):
                while True:
                    try:
                        if (await client.get("/readyz")).status_code == 200:
                            break
                    except httpx.TransportError:
                        assert worker.poll() is None, (tmp_path / "log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
            metrics = await client.get("/metrics")
        assert metrics.status_code == 200
        assert "# TYPE clawloop_worker_judge_request_seconds histogram" in metrics.text
    finally:
        worker.terminate()
        assert await asyncio.to_thread(worker.wait, 60) == 0
