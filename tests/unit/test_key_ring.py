"""The gateway's cache of API keys, on a fake store."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers

from api.auth import KeyRing
from clawloop.contracts.serving import ApiKey, Scope
from clawloop.errors import RequestRejected, StoreUnavailable
from tests.fakes.key_store import FakeKeyStore


class SlowKeyStore(FakeKeyStore):
    """Answers once `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def authenticate(self, secret: str) -> ApiKey | None:
        self.lookups += 1
        await self.released.wait()
        self.lookups -= 1
        return await super().authenticate(secret)


def bearer(secret: str) -> Headers:
    return Headers({"authorization": f"Bearer {secret}"})


async def test_concurrent_first_requests_with_a_key_look_it_up_once() -> None:
    store = SlowKeyStore()
    ring, secret = KeyRing(store), store.add("default", {Scope.CHAT})
    waiting = [asyncio.create_task(ring.require(bearer(secret), Scope.CHAT)) for _ in range(30)]
    other = asyncio.create_task(ring.require(bearer(store.add("other", {Scope.CHAT})), Scope.CHAT))
    await asyncio.sleep(0)
    waiting.pop(0).cancel()  # a client that disconnected
    await asyncio.sleep(0)
    assert store.lookups == 2
    store.released.set()
    assert {key.policy for key in await asyncio.gather(*waiting)} == {"default"}
    assert (await other).policy == "other"
    assert store.lookups == 2


async def test_a_failed_look_up_is_shared_by_those_who_wait_and_not_cached() -> None:
    store = SlowKeyStore()
    store.released.set()
    ring, secret = KeyRing(store, retry_seconds=0), store.add("default", {Scope.CHAT})
    store.available = False
    failed = await asyncio.gather(*(ring.require(bearer(secret), Scope.CHAT) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [StoreUnavailable] * 3
    store.available = True
    assert (await ring.require(bearer(secret), Scope.CHAT)).policy == "default"
    for _ in range(2):
        with pytest.raises(RequestRejected):
            await ring.require(bearer("cl-unknown"), Scope.CHAT)


async def test_the_first_request_with_a_key_waits_for_a_late_store() -> None:
    store = FakeKeyStore()
    ring, secret = KeyRing(store, retry_seconds=5), store.add("default", {Scope.CHAT})
    store.available = False
    request = asyncio.create_task(ring.require(bearer(secret), Scope.CHAT))
    await asyncio.sleep(0.05)
    store.available = True
    assert (await request).policy == "default"
    assert store.lookups == 2
