"""What a lost network costs the pool of a gateway, whose limit is shorter than a connection's time to answer."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.app.local.checks import choose_port
from clawloop.core.errors import StoreUnavailable
from db import database as database_module
from db.database import CHAT_LIMIT, Database
from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.slow

POOLED = 3
LIMIT = 4 * CHAT_LIMIT


def test_a_gateways_limit_is_shorter_than_a_connections_time_to_answer() -> None:
    assert CHAT_LIMIT < LIMIT < timedelta(seconds=database_module._ANSWER_SECONDS)


async def test_each_silent_connection_of_a_gateways_pool_costs_one_transaction_its_limit(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_IDLE_SECONDS", 0.0)  # they lay in the pool for long enough
    address = urlsplit(postgres_url)
    assert address.port is not None
    port = choose_port("a proxy", "127.0.0.1", 0, "")
    proxied = address._replace(netloc=address.netloc.replace(f":{address.port}", f":{port}")).geturl()
    together = asyncio.Barrier(POOLED)

    async def meet(connection: AsyncConnection) -> None:
        await together.wait()
        await connection.execute(text("SELECT 1"))

    async def answered() -> bool:
        try:
            await database.run(_select)
        except StoreUnavailable:
            return False
        return True

    # A gateway's is a quarter of it; here the first connections must not fail on a busy machine.
    database = Database(proxied, LIMIT)
    try:
        async with Proxy(address.port, port) as proxy:
            await asyncio.gather(*(database.run(meet) for _ in range(POOLED)))
            proxy.silence()
            assert [await answered() for _ in range(POOLED)] == [False] * POOLED
            async with asyncio.timeout(60):
                while not await answered():  # at once, but on a busy machine
                    pass
    finally:
        await database.close()


async def _select(connection: AsyncConnection) -> None:
    await connection.execute(text("SELECT 1"))
