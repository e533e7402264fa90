"""A draining server answers what is under way and one more request on each connection; a shared socket is shared."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

import api.http_protocol
from api.http_protocol import BoundedHttpProtocol
from clawloop.app.processes import draining_server
from clawloop.app.processes.draining_server import CUT_SECONDS, DrainingServer

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class App:
    """Answers each request once `go` is set; may send the headers before."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    headers_first: bool = False
    asked: int = 0
    cut: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.asked += 1
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        if self.headers_first:
            await send(head)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cut += 1
            raise
        if not self.headers_first:
            await send(head)
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class Serving:
    app: App
    server: DrainingServer
    port: int
    serving: asyncio.Task[None]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def stop(self, number: signal.Signals) -> None:
        self.server.handle_exit(number, None)

    async def accepted(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.server.server_state.connections) < count:
                await asyncio.sleep(0.01)

    async def asked(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.app.asked < count:
                await asyncio.sleep(0.01)


def server_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        lifespan="off",
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=CUT_SECONDS,
        timeout_keep_alive=75,
    )


@asynccontextmanager
async def serving(app: App, drain_seconds: float = 60) -> AsyncIterator[Serving]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(server_config(app), listener, timedelta(seconds=drain_seconds), lambda: None)
    running = Serving(app, server, listener.getsockname()[1], asyncio.create_task(server._serve([])))
    try:
        yield running
    finally:
        app.go.set()
        if not running.serving.done():
            running.stop(signal.SIGTERM)
        await asyncio.wait_for(running.serving, 30)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than a second for the client's next request."""
    monkeypatch.setattr(draining_server, "SILENT_SECONDS", 20.0)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert await reader.readexactly(2) == b"ok"
    return head.lower()


async def test_requests_under_way_are_finished_and_their_connections_closed() -> None:
    async with serving(App()) as running:
        reader, writer = await running.connect()
        writer.write(GET)
        await running.asked(1)
        running.stop(signal.SIGTERM)
        await asyncio.sleep(0.3)
        running.app.go.set()
        assert b"connection: close" in await _answer(reader)
        assert await reader.read() == b""
        writer.close()
        await asyncio.wait_for(running.serving, 30)


@pytest.mark.usefixtures("patient")
async def test_an_idle_connection_gets_one_more_answer_that_closes_it() -> None:
    async with serving(App()) as running:
        running.app.go.set()
        reader, writer = await running.connect()
        writer.write(GET)
        assert b"connection" not in await _answer(reader)
        running.stop(signal.SIGTERM)
        await asyncio.sleep(0.2)
        writer.write(GET)
        assert b"connection: close" in await _answer(reader)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("patient")
async def test_a_connection_whose_headers_are_sent_gets_one_more_answer() -> None:
    async with serving(App(headers_first=True)) as running:
        reader, writer = await running.connect()
        writer.write(GET)
        await running.asked(1)
        running.stop(signal.SIGTERM)
        await asyncio.sleep(0.2)
        running.app.go.set()
        assert b"connection" not in await _answer(reader)
        writer.write(GET)
        assert b"connection: close" in await _answer(reader)
        writer.close()


async def test_a_silent_connection_is_closed_and_does_not_hold_up_the_end() -> None:
    async with serving(App()) as running:
        reader, writer = await running.connect()
        running.stop(signal.SIGTERM)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await asyncio.wait_for(running.serving, 30)


@pytest.mark.parametrize("before", [b"", GET], ids=["alone", "behind another request"])
async def test_a_request_whose_head_arrives_in_two_parts_is_answered_however_late_the_second(
    monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(draining_server, "SILENT_SECONDS", 0.2)
    async with serving(App()) as running:
        running.app.go.set()
        silent, silent_writer = await running.connect()
        reader, writer = await running.connect()
        writer.write(before + GET[:10])
        await running.accepted(2)
        if before:
            await _answer(reader)
        running.stop(signal.SIGTERM)
        assert await asyncio.wait_for(silent.read(), 30) == b""
        await asyncio.sleep(0.3)  # what is silent as long is closed by now, whenever the server read its part
        writer.write(GET[10:])
        assert b"connection: close" in await _answer(reader)
        assert await reader.read() == b""
        for connected in (writer, silent_writer):
            connected.close()


async def test_a_head_that_does_not_arrive_holds_up_the_end_as_long_as_heads_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining_server, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 2.0)
    async with serving(App(), drain_seconds=600) as running:
        reader, writer = await running.connect()
        writer.write(GET[:10])
        await running.accepted(1)
        running.stop(signal.SIGTERM)
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 408 ")
        await asyncio.wait_for(running.serving, 30)
        writer.close()


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]])
async def test_sigint_cuts_requests_also_during_a_drain(before: list[signal.Signals]) -> None:
    async with serving(App(), drain_seconds=600) as running:
        _, writer = await running.connect()
        writer.write(GET)
        await running.asked(1)
        for number in (*before, signal.SIGINT):
            running.stop(number)
        await asyncio.wait_for(running.serving, 30)
        assert running.app.cut == 1
        writer.close()


async def test_connections_that_arrive_together_are_shared() -> None:
    held = socket.create_server(("127.0.0.1", 0), backlog=100)
    apps = [App(), App()]
    servers = []
    for app in apps:
        servers.append(DrainingServer(server_config(app), held.dup(), timedelta(seconds=60), lambda: None))
        app.go.set()
    # They wait in the kernel's queue until the servers start.
    clients = [await asyncio.open_connection(*held.getsockname()) for _ in range(20)]
    tasks = [asyncio.create_task(server._serve([])) for server in servers]
    for reader, writer in clients:
        writer.write(GET)
        await _answer(reader)
    for server in servers:
        server.handle_exit(signal.SIGTERM, None)
    for _, writer in clients:
        writer.close()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    held.close()
    assert sum(app.asked for app in apps) == 20
    assert all(app.asked for app in apps)
