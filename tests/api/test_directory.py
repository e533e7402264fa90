"""What the gateway knows of policies and engines: who asks for what is newer than its last look is not turned away."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from api import directory
from api.directory import DirectoryCache
from clawloop.contracts.serving import Directory, Policy
from clawloop.errors import StoreUnavailable
from db.serving.directory import DEFAULT_SAMPLING
from tests.api.conftest import Gateway
from tests.fakes.directory_store import FakeDirectoryStore

POLICY = Policy("default", "tiny", (), 0, dict(DEFAULT_SAMPLING))


class CountedStore(FakeDirectoryStore):
    """
    Attributes:
        reads: how often it was asked.
    """

    def __init__(self) -> None:
        super().__init__(Directory((POLICY,), ()))
        self.reads = 0

    async def read(self) -> Directory:
        self.reads += 1
        found = await super().read()
        await asyncio.sleep(0.01)
        return found

    def add_policy(self, name: str) -> None:
        self._directory = replace(self._directory, policies=(*self._directory.policies, replace(POLICY, id=name)))


@pytest.fixture(autouse=True)
def looks_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REFRESH_SECONDS", 3600)


async def test_a_version_that_an_engine_loaded_just_now_may_be_named(fresh_gateway: Gateway) -> None:
    fresh_gateway.directory.set_active(0, versions=frozenset({7}))
    body = {"model": "default-v7", "messages": [{"role": "user", "content": "Hello."}]}
    async with fresh_gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_policy_made_just_now_is_known() -> None:
    store = CountedStore()
    async with DirectoryCache(store) as cache:
        store.add_policy("second")
        with pytest.raises(StoreUnavailable):
            cache.policy("second")
        assert (await cache.find_policy("second")).id == "second"


async def test_who_misses_something_together_shares_one_look() -> None:
    store = CountedStore()
    async with DirectoryCache(store) as cache:
        asked = await asyncio.gather(*[cache.find_policy("none") for _ in range(20)], return_exceptions=True)
        assert {type(error) for error in asked} == {StoreUnavailable}
        assert store.reads == 3  # at the start, for the first, and for all who asked after that look had begun


async def test_who_misses_something_while_postgres_is_away_asks_it_once_and_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.05)
    store = CountedStore()
    async with DirectoryCache(store) as cache:
        store.available = False
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await cache.find_policy("none")
        assert store.reads == 2
        assert (await cache.find_policy("default")) == POLICY


async def test_what_is_missed_while_postgres_stops_for_a_moment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "REFRESH_SECONDS", 0.1)
    store = CountedStore()
    async with DirectoryCache(store) as cache:
        store.available = False
        while cache.up_to_date:
            await asyncio.sleep(0.01)
        asked = asyncio.create_task(cache.find_policy("second"))
        await asyncio.sleep(0.2)
        assert not asked.done()
        store.add_policy("second")
        store.available = True
        assert (await asked).id == "second"


async def test_nobody_is_told_that_there_is_no_such_model_while_nobody_can_look(
    fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.05)
    fresh_gateway.directory.available = False
    body = {"model": "default-v7", "messages": [{"role": "user", "content": "Hello."}]}
    async with fresh_gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
