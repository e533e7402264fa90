"""The directory cache: a request for what is newer than the snapshot refreshes it instead of failing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from clawloop.core.contracts.serving import Directory, Policy
from clawloop.core.errors import StoreUnavailable
from clawloop.serving import directory
from clawloop.serving.directory import DirectoryCache
from db.serving.directory import DEFAULT_SAMPLING
from tests.api.conftest import Gateway
from tests.fakes.directory_store import FakeDirectoryStore

POLICY = Policy("default", "tiny", (), 0, dict(DEFAULT_SAMPLING))


class CountingStore(FakeDirectoryStore):
    """
    Attributes:
        reads: how often `read` was called.
    """

    def __init__(self) -> None:
        super().__init__(Directory((POLICY,), ()))
        self.reads = 0

    async def read(self) -> Directory:
        self.reads += 1
        read = await super().read()
        await asyncio.sleep(0.01)
        return read

    def add_named(self, name: str) -> None:
        self._directory = replace(self._directory, policies=(*self._directory.policies, replace(POLICY, id=name)))


@pytest.fixture(autouse=True)
def no_periodic_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REFRESH_SECONDS", 3600)


async def test_a_version_that_an_engine_just_loaded_can_be_named(fresh_gateway: Gateway) -> None:
    fresh_gateway.directory.set_active(0, versions=frozenset({7}))
    body = {"model": "default-v7", "messages": [{"role": "user", "content": "Hello."}]}
    async with fresh_gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_policy_that_was_just_created_is_found() -> None:
    store = CountingStore()
    async with DirectoryCache(store.read) as cache:
        store.add_named("second")
        with pytest.raises(StoreUnavailable):
            cache.policy("second")
        assert (await cache.find_policy("second")).id == "second"


async def test_concurrent_misses_share_one_refresh() -> None:
    store = CountingStore()
    async with DirectoryCache(store.read) as cache:
        results = await asyncio.gather(*[cache.find_policy("none") for _ in range(20)], return_exceptions=True)
        assert {type(error) for error in results} == {StoreUnavailable}
        assert (
            store.reads == 3
        )  # at the start, for the first request, and for all that came after that refresh had begun


async def test_a_miss_while_postgres_is_away_reads_once_and_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.05)
    store = CountingStore()
    async with DirectoryCache(store.read) as cache:
        store.available = False
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await cache.find_policy("none")
        assert store.reads == 2
        assert (await cache.find_policy("default")) == POLICY


async def test_a_miss_during_a_short_outage_is_found_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REFRESH_SECONDS", 0.1)
    store = CountingStore()
    async with DirectoryCache(store.read) as cache:
        store.available = False
        while cache.up_to_date:
            await asyncio.sleep(0.01)
        request = asyncio.create_task(cache.find_policy("second"))
        await asyncio.sleep(0.2)
        assert not request.done()
        store.add_named("second")
        store.available = True
        assert (await request).id == "second"


async def test_an_unknown_model_is_503_while_the_directory_cannot_be_read(
    fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.05)
    fresh_gateway.directory.available = False
    body = {"model": "default-v7", "messages": [{"role": "user", "content": "Hello."}]}
    async with fresh_gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
