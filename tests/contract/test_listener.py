"""Gateways are notified of a new active version at once, also after PostgreSQL was down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import psycopg
import pytest

from clawloop.serving.directory import DirectoryCache
from db.database import Database
from db.serving.directory import PostgresDirectoryStore, PostgresListener
from db.serving.engines import add_engine
from db.serving.publishing import PostgresPublishingStore
from tests.conftest import execute


async def soon(notices: AsyncIterator[None]) -> None:
    async with asyncio.timeout(30):
        await anext(notices)


async def commit(database: Database, url: str, n: int) -> PostgresPublishingStore:
    """A version that an engine has."""
    execute(url, f"INSERT INTO versions (policy, n, parent, path) VALUES ('default', {n}, {n - 1}, 'v{n}')")
    execute(url, f"UPDATE policies SET head = {n}")
    await add_engine(database, "http://gpu:8100")
    store = PostgresPublishingStore(database)
    await store.loaded("gpu:8100", "default", n)
    return store


async def test_each_activation_notifies_listeners(database: Database, postgres_url: str) -> None:
    async with aclosing(PostgresListener(postgres_url).changes()) as notices:
        await soon(notices)  # it listens
        store = await commit(database, postgres_url, 1)
        assert await store.activate("default", 1, 0)
        await soon(notices)
        for n in (2, 3):  # while nothing listens
            await commit(database, postgres_url, n)
            assert await store.activate("default", n, 0)
        await soon(notices)


async def test_a_reconnection_counts_as_a_change(database: Database, postgres_url: str) -> None:
    async with aclosing(PostgresListener(postgres_url).changes()) as notices:
        await soon(notices)
        waiting = asyncio.create_task(soon(notices))
        await asyncio.sleep(0.1)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'clawloop notices'"
            ).fetchall()
        assert (True,) in ended  # that of a listener before it may be ending yet
        await waiting


async def test_a_gateway_sees_a_new_version_before_its_next_poll(
    database: Database, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawloop.serving.directory.REFRESH_SECONDS", 3600.0)
    async with DirectoryCache(PostgresDirectoryStore(database).read, PostgresListener(postgres_url).changes) as cache:
        await asyncio.sleep(0.5)
        assert cache.policy("default").active == 0
        store = await commit(database, postgres_url, 1)
        assert await store.activate("default", 1, 0)
        async with asyncio.timeout(30):  # the next poll is in an hour
            while cache.policy("default").active != 1:
                await asyncio.sleep(0.005)
