"""Gateways on one socket that a supervisor holds: whatever ends one of them, no connection is refused."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from clawloop.app.local import parts
from clawloop.app.local.checks import bound_socket
from clawloop.app.local.parts import Deployment
from clawloop.app.local.supervision.supervisor import PartState, Supervisor
from clawloop.core.ids import turn_id_of
from db.database import BACKGROUND_LIMIT, Database
from db.turns.insert import PostgresTurnStore
from tests.e2e.gateway import prepared
from tests.fakes.engine import fake_engine
from tests.local.status_recorder import StatusRecorder
from tests.processes import guarded_child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CLIENTS = 8
NAMES = ("gateway-0", "gateway-1")


@dataclass
class Gateways:
    """Two gateways under a supervisor, and clients that chat with them.

    Attributes:
        acknowledged: ids of the answers whose end a client saw.
        failures: what a client saw instead.
        failed_again: failures of the request after a failed one, on a new connection.
    """

    url: str
    key: str
    supervisor: Supervisor
    statuses: StatusRecorder
    acknowledged: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    failed_again: list[str] = field(default_factory=list)
    stop: bool = False

    def process(self, name: str) -> psutil.Process:
        return guarded_child(f"--name {name}")

    async def ready(self, name: str, times: int) -> None:
        """Wait until a gateway has become ready that many times; a start takes half a minute on a busy machine."""
        async with asyncio.timeout(120):
            while self.statuses.states(name).count(PartState.READY) < times:
                await asyncio.sleep(0.05)

    async def spools_empty(self) -> None:
        """Wait until every turn is in PostgreSQL: on a busy machine some go by the spool."""
        self.stop = True
        async with httpx.AsyncClient(base_url=self.url) as client, asyncio.timeout(120):
            for name in NAMES:
                series = f'clawloop_gateway_spool_turns{{gateway="{name}"}} 0.0'
                while series not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.1)

    async def more_turns(self, count: int) -> None:
        goal = len(self.acknowledged) + count
        async with asyncio.timeout(120):
            while len(self.acknowledged) < goal:
                await asyncio.sleep(0.02)

    async def chat(self, session: str) -> None:
        """Chat on one connection for as long as it is kept alive."""
        history: list[dict[str, Any]] = []
        headers = {"Authorization": f"Bearer {self.key}", "X-Session-Id": session}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120) as client:
            failed_before = False
            while not self.stop:
                messages = [*history, {"role": "user", "content": f"{session} question {len(history)}"}]
                body = {"model": "policy", "messages": messages, "stream": True}
                failure = None
                try:
                    answer = await client.post("/v1/chat/completions", json=body)
                except httpx.TransportError as error:
                    failure = f"{type(error).__name__}: {error}"
                else:
                    if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
                        failure = f"{answer.status_code}: {answer.text[-200:]}"
                    else:
                        chunks = [orjson.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
                        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                        self.acknowledged.append(chunks[0]["id"])
                        history = [*messages, {"role": "assistant", "content": text}][-4:]
                if failure is not None:
                    (self.failed_again if failed_before else self.failures).append(failure)
                failed_before = failure is not None


@asynccontextmanager
async def chatting(postgres_url: str, folder: Path) -> AsyncIterator[Gateways]:
    async with fake_engine() as engine:
        engine.delay_seconds = 0.03
        keys = await prepared(postgres_url, [engine.url])
        statuses = StatusRecorder()
        supervisor = Supervisor(folder / "logs", statuses)
        deployment = Deployment(folder, postgres_url, "127.0.0.1:1", (), "tiny-random", (), keys)
        with bound_socket("the gateway", "127.0.0.1", 0, "") as listener:
            listener.listen(100)
            gateways = parts.gateways(deployment, listener, len(NAMES), {"PATH": "/usr/bin:/bin"})
            for gateway in gateways:
                supervisor.start(gateway)
            running = Gateways(gateways[0].address, keys["chat"], supervisor, statuses)
            chats: list[asyncio.Task[None]] = []
            try:
                await supervisor.all_ready()
                chats = [asyncio.create_task(running.chat(f"s{number}")) for number in range(CLIENTS)]
                yield running
                running.stop = True
                await asyncio.gather(*chats)
            finally:
                for chat in chats:
                    chat.cancel()
                await supervisor.stop([NAMES])


@pytest.mark.long
async def test_a_gateway_that_gets_sigterm_fails_no_request(postgres_url: str, tmp_path: Path) -> None:
    async with chatting(postgres_url, tmp_path) as gateways:
        await gateways.more_turns(2 * CLIENTS)
        for name in NAMES:
            gateways.process(name).send_signal(signal.SIGTERM)
            await gateways.ready(name, 2)
            await gateways.more_turns(CLIENTS)
        await gateways.spools_empty()
        waits = [status.detail for status in gateways.statuses.history if status.state is PartState.WAITING]
    assert (gateways.failures, gateways.failed_again) == ([], [])
    assert all("was ended by SIGTERM" in wait for wait in waits)
    await _all_stored(gateways, postgres_url)


async def test_a_killed_gateway_fails_only_what_it_held_and_a_retry_succeeds_at_once(
    postgres_url: str, tmp_path: Path
) -> None:
    async with chatting(postgres_url, tmp_path) as gateways:
        held = 0
        for kill, names in enumerate((NAMES[:1], NAMES), 1):  # with no gateway left, connections wait
            await gateways.more_turns(2 * CLIENTS)
            processes = [gateways.process(name) for name in names]
            for process in processes:
                process.suspend()  # so that what it holds does not change until it is killed
            held += sum(_connections(process, httpx.URL(gateways.url).port) for process in processes)
            for process in processes:
                process.kill()
            for name in names:
                await gateways.ready(name, kill + (name == NAMES[0]))
        await gateways.more_turns(2 * CLIENTS)
        await gateways.spools_empty()
    assert 0 < len(gateways.failures) <= held
    assert gateways.failed_again == []
    assert not any("ConnectError" in failure for failure in gateways.failures)
    delays = [status.detail.rsplit("in ", 1)[1] for status in gateways.statuses.history if "in " in status.detail]
    assert all(float(delay.removesuffix(" s")) <= 2 for delay in delays)
    await _all_stored(gateways, postgres_url)


async def test_metrics_are_of_all_gateways_and_on_a_health_port_of_one(postgres_url: str, tmp_path: Path) -> None:
    async with chatting(postgres_url, tmp_path) as gateways:
        await gateways.more_turns(4 * CLIENTS)
        ports = {name: _health_port(gateways.process(name)) for name in NAMES}
        async with httpx.AsyncClient() as client:
            everything = (await client.get(f"{gateways.url}/metrics")).text
            alone = {name: (await client.get(f"http://127.0.0.1:{port}/metrics")).text for name, port in ports.items()}
            gateways.process(NAMES[1]).suspend()
            partial = (await client.get(f"http://127.0.0.1:{ports[NAMES[0]]}/metrics")).text
            gateways.process(NAMES[1]).resume()
    for name in NAMES:
        series = f'clawloop_gateway_requests_total{{gateway="{name}",status="200"}}'
        assert series in everything
        assert [series in page for page in alone.values()] == [name == own for own in alone]
    assert NAMES[0] in partial


def _connections(process: psutil.Process, port: int | None) -> int:
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
        for connection in process.net_connections("tcp")
    )


def _health_port(process: psutil.Process) -> int:
    command = process.cmdline()
    return int(command[command.index("--health-port") + 1])


async def _all_stored(gateways: Gateways, url: str) -> None:
    """Each acknowledged turn is in PostgreSQL."""
    database = Database(url, BACKGROUND_LIMIT)
    store = PostgresTurnStore(database)
    try:
        missing = [
            answer
            for answer in gateways.acknowledged
            if (turn := turn_id_of(answer)) is None or await store.load(turn) is None
        ]
    finally:
        await database.close()
    assert missing == []
