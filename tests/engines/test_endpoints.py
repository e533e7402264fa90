"""A request is answered although its connection fell silent, and is not sent twice because its server is slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from clawloop.local.checks import choose_port
from clawloop.serving import connections, endpoints
from clawloop.serving.endpoints import AnswerTimes, Endpoint, JsonClient, NoReply
from tests.chaos.proxy import Proxy
from tests.fakes.engine import serving

LOOPBACK = "127.0.0.1"


@dataclass
class Slow:
    """A server behind a proxy, whose n-th answer waits for `release(n)`.

    Attributes:
        seen: how many requests came.
    """

    url: str
    proxy: Proxy
    seen: int = 0
    arrivals: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    released: dict[int, asyncio.Event] = field(default_factory=dict)

    def release(self, n: int) -> None:
        self.released.setdefault(n, asyncio.Event()).set()

    async def answer(self, _: Request) -> JSONResponse:
        self.seen += 1
        n = self.seen
        self.arrivals.put_nowait(n)
        await self.released.setdefault(n, asyncio.Event()).wait()
        return JSONResponse({"n": n})

    async def ask(self, client: JsonClient) -> int:
        reply = await client.post([Endpoint(self.url, "tiny")], "/ask", {})
        assert reply.body is not None
        return int(reply.body["n"])


@pytest.fixture
async def slow() -> AsyncIterator[Slow]:
    async with slow_server() as running:
        yield running


@asynccontextmanager
async def slow_server() -> AsyncIterator[Slow]:
    async def answer(request: Request) -> JSONResponse:
        return await server.answer(request)

    async with serving(Starlette(routes=[Route("/ask", answer, methods=["POST"])])) as url:
        port = choose_port("the proxy", LOOPBACK, 0, "")
        async with Proxy(urlsplit(url).port or 0, port) as proxy:
            server = Slow(f"http://{LOOPBACK}:{port}", proxy)
            yield server
            for n in range(1, server.seen + 1):
                server.release(n)


async def test_a_request_on_a_connection_that_falls_silent_is_sent_again(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 0.5)
    async with JsonClient(300) as client:
        asked = asyncio.create_task(slow.ask(client))
        assert await slow.arrivals.get() == 1
        slow.proxy.silence()
        slow.release(1)
        slow.release(2)
        assert await asked == 2


async def test_an_idle_connection_that_fell_silent_is_not_used(slow: Slow) -> None:
    async with JsonClient(300) as client:
        for n in (1, 2, 3):
            slow.release(n)
            assert await slow.ask(client) == n
            slow.proxy.silence()


async def test_the_first_answer_counts_though_the_request_was_sent_again(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 0.05)
    async with JsonClient(300) as client:
        asked = asyncio.create_task(slow.ask(client))
        assert [await slow.arrivals.get() for _ in range(2)] == [1, 2]
        slow.release(1)
        assert await asked == 1
        assert slow.seen == 2  # at most two


async def test_the_first_answer_counts_though_the_second_request_fails(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 0.5)
    async with JsonClient(300) as client:
        asked = asyncio.create_task(slow.ask(client))
        assert await slow.arrivals.get() == 1
        slow.proxy.stop_listening()
        await asyncio.sleep(1.0)  # the second request is refused meanwhile
        slow.release(1)
        assert await asked == 1


async def test_two_requests_without_an_answer_end_at_the_time_limit(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 0.1)
    async with JsonClient(1.0) as client:
        with pytest.raises(NoReply, match="no answer within 1 s"):
            await slow.ask(client)


def test_a_request_is_overdue_after_three_times_the_slowest_of_the_last_answers() -> None:
    times = AnswerTimes()
    assert times.overdue_seconds() == endpoints.LEAST_OVERDUE_SECONDS
    for seconds in (1.0, 20.0, 2.0):
        times.add(seconds)
    assert times.overdue_seconds() == 60.0
    for _ in range(64):
        times.add(1.0)
    assert times.overdue_seconds() == endpoints.LEAST_OVERDUE_SECONDS


@pytest.mark.parametrize("keep_seconds", [0, 3])
async def test_the_kernel_asks_whether_the_other_machine_is_there(keep_seconds: float) -> None:
    ended = asyncio.Event()

    async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n")  # and no content: the connection stays in use
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(begins, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        aiohttp.ClientSession(connector=connections.connector(keep_seconds)) as session,
        session.get(url) as answer,
    ):
        assert answer.connection is not None
        assert answer.connection.transport is not None
        used = answer.connection.transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [used.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [
            connections.IDLE_SECONDS,
            connections.PROBE_SECONDS,
            connections.PROBES,
            connections.UNACKNOWLEDGED_MILLISECONDS,
        ]
    await ended.wait()
