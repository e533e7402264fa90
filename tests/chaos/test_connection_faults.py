"""A fault of connections counts only if there was one that it could affect."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest

from clawloop.app.local.checks import choose_port
from tests.chaos import faults
from tests.chaos.faults import Fault, NotReached, all_faults
from tests.chaos.proxy import Proxy
from tests.chaos.stack import Stack

KINDS = ("cut gateway", "delay gateway", "silence gateway", "double gateway")


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """Before a server that answers what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(64):
                writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = choose_port("the proxy", "127.0.0.1", 0, "")
        async with Proxy(server.sockets[0].getsockname()[1], port) as running:
            yield running


def fault_of(stack: Stack, kind: str) -> Fault:
    return next(fault for fault in all_faults(stack, longest_seconds=0.1) if fault.kind == kind)


def stack_of(proxy: Proxy) -> Stack:
    return cast(
        Stack,
        SimpleNamespace(
            proxies={"gateway": proxy}, ours=("gateway",), ranks=1, judges=1, own_engine=False, practises=False
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_connection_it_is_not_reached(proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "REACHED_WITHIN_SECONDS", 0.0)
    stack = stack_of(proxy)
    with pytest.raises(NotReached):
        await fault_of(stack, kind).inject(stack, random.Random(1))


@pytest.mark.parametrize("kind", KINDS)
async def test_it_is_injected_until_it_affects_a_connection(proxy: Proxy, kind: str) -> None:
    stack = stack_of(proxy)
    injecting = asyncio.ensure_future(fault_of(stack, kind).inject(stack, random.Random(1)))
    await asyncio.sleep(0.3)
    assert not injecting.done()
    while not injecting.done():
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"hello")
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(64), 0.3)
            writer.close()
    await injecting
    assert proxy.affected[kind.partition(" ")[0]] > 0


@pytest.mark.parametrize("rounds", range(4))
async def test_a_connection_that_comes_while_others_are_refused_is_closed(proxy: Proxy, rounds: int) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        for _ in range(rounds):
            await asyncio.sleep(0)
        await proxy.refuse()
        gc.collect()  # an unclosed connection is a warning, thus an error
        with suppress(ConnectionResetError):
            assert await asyncio.to_thread(client.recv, 1) == b""
