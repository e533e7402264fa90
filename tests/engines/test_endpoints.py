"""A request is answered although its connection fell silent, and is not sent twice because its server is slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from clawloop.app.local.checks import choose_port
from clawloop.serving import endpoints
from clawloop.serving import endpoints as endpoints_module
from clawloop.serving.endpoints import AnswerTimes, Endpoint, JsonClient, NoReply, Reply
from tests.chaos.proxy import Proxy
from tests.fakes.engine import serving

LOOPBACK = "127.0.0.1"


@dataclass
class Slow:
    """A server behind a proxy, whose n-th answer waits for `release(n)`.

    Attributes:
        statuses: of some of the answers; 200 else.
    """

    url: str = ""
    arrivals: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    statuses: dict[int, int] = field(default_factory=dict)
    seen: int = 0
    _released: dict[int, asyncio.Event] = field(default_factory=dict)

    def release(self, *numbers: int) -> None:
        for n in numbers:
            self._released.setdefault(n, asyncio.Event()).set()

    async def answer(self, _: Request) -> JSONResponse:
        self.seen += 1
        n = self.seen
        self.arrivals.put_nowait(n)
        await self._released.setdefault(n, asyncio.Event()).wait()
        return JSONResponse({"n": n}, self.statuses.get(n, 200))

    async def ask(self, client: JsonClient, *before: Endpoint) -> Reply:
        return await client.post([*before, Endpoint(self.url, "tiny")], "/ask", {})


@pytest.fixture
async def slow() -> AsyncIterator[Slow]:
    server = Slow()
    async with serving(Starlette(routes=[Route("/ask", server.answer, methods=["POST"])])) as server.url:
        yield server
        server.release(*range(1, server.seen + 1))


@pytest.fixture
async def proxy(slow: Slow) -> AsyncIterator[Proxy]:
    port = choose_port("the proxy", LOOPBACK, 0, "")
    async with Proxy(urlsplit(slow.url).port or 0, port) as proxy:
        slow.url = f"http://{LOOPBACK}:{port}"
        yield proxy


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 0.05)


async def n_of(asked: Awaitable[Reply]) -> int:
    reply = await asked
    assert reply.body is not None
    return int(reply.body["n"])


async def asked_twice(slow: Slow, client: JsonClient) -> asyncio.Task[Reply]:
    """A request that was sent again, when both have arrived."""
    asked = asyncio.create_task(slow.ask(client))
    assert [await slow.arrivals.get() for _ in range(2)] == [1, 2]
    return asked


@pytest.mark.slow
async def test_a_request_on_a_connection_that_falls_silent_is_sent_again(
    slow: Slow, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 8.0)  # the first connection is silent before
    async with JsonClient(200) as client:
        asked = asyncio.create_task(slow.ask(client))
        assert await slow.arrivals.get() == 1
        proxy.silence()
        slow.release(1, 2)
        assert await n_of(asked) == 2


@pytest.mark.usefixtures("impatient")
async def test_a_request_on_an_idle_connection_that_fell_silent_is_sent_again(slow: Slow, proxy: Proxy) -> None:
    slow.release(*range(1, 100))
    async with JsonClient(200) as client:
        for _ in range(3):
            assert (await slow.ask(client)).status == 200
            proxy.silence()


@pytest.mark.usefixtures("impatient")
async def test_the_first_answer_counts_though_the_request_was_sent_again(slow: Slow) -> None:
    async with JsonClient(200) as client:
        asked = await asked_twice(slow, client)
        slow.release(1)
        assert await n_of(asked) == 1
        assert slow.seen == 2  # never more


@pytest.mark.usefixtures("impatient")
async def test_a_second_request_that_is_refused_leaves_the_first_to_be_answered(slow: Slow) -> None:
    """As by a server that answers one request of a key at a time."""
    slow.statuses[2] = 429
    async with JsonClient(200) as client:
        asked = await asked_twice(slow, client)
        slow.release(2)
        finished, _ = await asyncio.wait([asked], timeout=0.3)
        assert not finished
        slow.release(1)
        assert await n_of(asked) == 1


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_is_refused_for_itself_is_refused_though_the_first_is_lost(slow: Slow) -> None:
    slow.statuses[2] = 413
    async with JsonClient(200) as client:
        asked = await asked_twice(slow, client)
        slow.release(2)
        assert (await asked).status == 413


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_refusal_counts_when_the_other_request_has_no_answer_in_time(slow: Slow) -> None:
    slow.statuses[2] = 429
    slow.release(2)
    async with JsonClient(8.0) as client:
        assert (await slow.ask(client)).status == 429


@pytest.mark.usefixtures("impatient")
async def test_two_refusals_are_a_refusal(slow: Slow) -> None:
    slow.statuses |= {1: 503, 2: 429}
    async with JsonClient(200) as client:
        asked = await asked_twice(slow, client)
        slow.release(1, 2)
        assert (await asked).status in (503, 429)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_two_requests_without_an_answer_end_at_the_time_limit(slow: Slow) -> None:
    async with JsonClient(8.0) as client:
        with pytest.raises(NoReply, match="no answer within 8 s"):
            await slow.ask(client)
    assert slow.seen == 2


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_few_requests_are_sent_again_at_once(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "OCCUPIED_SECONDS", 8.0)
    async with JsonClient(200) as client:
        asked = [asyncio.create_task(slow.ask(client)) for _ in range(5)]
        for _ in range(5 + endpoints.SENT_AGAIN_AT_ONCE):
            await slow.arrivals.get()
        await asyncio.sleep(0.3)
        assert slow.seen == 5 + endpoints.SENT_AGAIN_AT_ONCE
        for _ in range(3):  # those that were sent again may be lost, too
            await slow.arrivals.get()
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)


async def test_a_request_of_a_slow_server_is_sent_again_while_it_can_still_be_answered(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LEAST_OVERDUE_SECONDS", 100.0)
    monkeypatch.setattr(endpoints, "LATEST_PART", 0.01)
    slow.release(2)
    async with JsonClient(100) as client:
        assert await n_of(slow.ask(client)) == 2


async def test_a_server_that_cannot_be_reached_is_passed_over(slow: Slow) -> None:
    slow.release(1, 2, 3, 4)
    port = choose_port("nobody", LOOPBACK, 0, "")
    async with JsonClient(200) as client:
        for n in range(1, 5):  # in random order
            assert await n_of(slow.ask(client, Endpoint(f"http://{LOOPBACK}:{port}", "tiny"))) == n


def test_a_request_is_overdue_after_twice_the_slowest_answer_of_the_last_ten_minutes() -> None:
    now, limit, latest = 0.0, 300.0, 200.0
    times = AnswerTimes(lambda: now)
    assert times.overdue_seconds(limit) == endpoints.LEAST_OVERDUE_SECONDS
    times.add(20.0)
    now = 300.0
    times.add(10.0)
    assert times.overdue_seconds(limit) == 40.0
    now = 601.0
    assert times.overdue_seconds(limit) == 20.0
    now = 901.0
    assert times.overdue_seconds(limit) == endpoints.LEAST_OVERDUE_SECONDS
    times.add(110.0)
    assert times.overdue_seconds(limit) == pytest.approx(latest)
    times.add(201.0)  # it answers, but a second request would be too late
    assert times.overdue_seconds(limit) is None


@pytest.mark.parametrize("reused", [False, True])
async def test_the_kernel_asks_whether_the_other_machine_is_there(reused: bool) -> None:
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
        aiohttp.ClientSession(connector=endpoints_module.connector(reused=reused)) as session,
        session.get(url) as answer,
    ):
        assert answer.connection is not None
        assert answer.connection.transport is not None
        used = answer.connection.transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        options = [used.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        assert options == [
            endpoints_module.ASK_SECONDS,
            endpoints_module.ASK_SECONDS,
            endpoints_module.GONE_MILLISECONDS,
        ]
    await ended.wait()
