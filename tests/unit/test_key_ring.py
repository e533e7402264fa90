"""The gateway's cache of API keys, on a fake store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from starlette.datastructures import Headers

from api.auth import KeyRing
from clawloop.core.contracts.serving import ApiKey, Scope
from clawloop.core.episodes.keys import EpisodeKey, sign
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.core.ids import ApiKeyId, new_episode_id
from tests.fakes.key_store import SIGNING_SECRET, FakeKeyStore


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


HOUR = timedelta(hours=1)


async def test_an_episodes_key_never_seen_is_accepted_while_the_store_is_away() -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    _, first = store.add_episode("default", datetime.now(UTC) + HOUR)
    assert (await ring.require(bearer(first), Scope.CHAT)).episode is not None
    store.available = False
    unseen = EpisodeKey(new_episode_id(), "other", (datetime.now(UTC) + HOUR).replace(microsecond=0))
    key = await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)
    assert key.id == ApiKeyId(unseen.episode)
    assert (key.policy, key.episode) == ("other", unseen.episode)
    with pytest.raises(StoreUnavailable):
        await ring.require(bearer(sign(unseen, b"another secret")), Scope.CHAT)
    with pytest.raises(RequestRejected, match="needs a key with the scope admin"):
        await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.ADMIN)


async def test_a_signing_secret_that_was_replaced_signs_no_key_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    await ring.require(bearer(store.add_episode("default", datetime.now(UTC) + HOUR)[1]), Scope.CHAT)
    store.signing = b"another secret"
    monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.0)  # half a minute later
    await ring.require(bearer(store.add_episode("default", datetime.now(UTC) + HOUR)[1]), Scope.CHAT)
    store.available = False
    unseen = EpisodeKey(new_episode_id(), "default", datetime.now(UTC) + HOUR)
    with pytest.raises(StoreUnavailable):
        await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)
    assert (await ring.require(bearer(sign(unseen, store.signing)), Scope.CHAT)).episode == unseen.episode


async def test_a_gateway_reads_the_signing_secret_again_though_no_episode_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.01)
    async with KeyRing(store, retry_seconds=0) as ring:
        await ring.require(bearer(store.add_episode("default", datetime.now(UTC) + HOUR)[1]), Scope.CHAT)
        store.available = False
        await asyncio.sleep(0.05)  # an outage ends nothing
        store.available = True
        read = store.signing_secret
        monkeypatch.setattr(store, "signing_secret", bug := Mock(side_effect=RuntimeError("a bug")))
        async with asyncio.timeout(30):
            while not bug.called:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(store, "signing_secret", read)
        store.signing = b"another secret"
        async with asyncio.timeout(30):
            while ring._signing_secret != store.signing:
                await asyncio.sleep(0.01)
        store.available = False
        unseen = EpisodeKey(new_episode_id(), "default", datetime.now(UTC) + HOUR)
        with pytest.raises(StoreUnavailable):
            await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)


async def test_a_gateway_reads_the_signing_secret_before_any_episode_asks() -> None:
    store = FakeKeyStore()
    async with KeyRing(store, retry_seconds=0) as ring:
        async with asyncio.timeout(30):
            while ring._signing_secret is None:
                await asyncio.sleep(0.01)
        store.available = False
        unseen = EpisodeKey(new_episode_id(), "default", datetime.now(UTC) + HOUR)
        assert (await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)).episode == unseen.episode


async def test_a_gateway_that_never_read_the_signing_secret_cannot_check_a_key() -> None:
    store = FakeKeyStore()
    _, secret = store.add_episode("default", datetime.now(UTC) + HOUR)
    store.available = False
    with pytest.raises(StoreUnavailable):
        await KeyRing(store, retry_seconds=0).require(bearer(secret), Scope.CHAT)


async def test_no_cache_outlives_an_expired_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    _, secret = store.add_episode("default", datetime.now(UTC) + timedelta(seconds=60))
    await ring.require(bearer(secret), Scope.CHAT)
    store.available = False
    later = datetime.now(UTC) + timedelta(seconds=61)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return later

    monkeypatch.setattr("api.auth.datetime", Later)
    with pytest.raises(RequestRejected, match="belonged to an episode that has ended"):
        await ring.require(bearer(secret), Scope.CHAT)
    with pytest.raises(StoreUnavailable):  # by now it is not cached, and its signature is of no use
        await ring.require(bearer(secret), Scope.CHAT)


async def test_the_end_of_an_episode_is_seen_when_its_key_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    _, secret = store.add_episode("default", datetime.now(UTC) + HOUR)
    await ring.require(bearer(secret), Scope.CHAT)
    store.end_episode(secret)
    await ring.require(bearer(secret), Scope.CHAT)  # cached for FRESH_SECONDS
    monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.0)
    with pytest.raises(RequestRejected):
        await ring.require(bearer(secret), Scope.CHAT)
