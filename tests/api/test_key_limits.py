"""Limits of a key: refused with 429 in time, counted by bucket, shared by gateways."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from starlette.datastructures import Headers

from api.chat.key_limits import KeyLimiter, StoredBytes
from clawloop.core.contracts.serving import ApiKey, KeyLimits, Scope
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.core.ids import ApiKeyId, new_api_key_id, new_episode_id
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, until
from tests.fakes.key_store import FakeKeyStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(**limits: int) -> ApiKey:
    return ApiKey(new_api_key_id(), "default", frozenset({Scope.CHAT}), limits=KeyLimits(**limits))


def chat(limiter: KeyLimiter, one: ApiKey, tokens: int = 0) -> None:
    with limiter.admit(one):
        limiter.charge(one, tokens)


def refusal(limiter: KeyLimiter, one: ApiKey) -> RequestRejected:
    with pytest.raises(RequestRejected) as raised:
        chat(limiter, one)
    assert (raised.value.status, raised.value.code) == (429, "rate_limit_exceeded")
    return raised.value


def test_requests_come_back_steadily() -> None:
    clock, mine, other = Clock(), key(requests_per_minute=6), key(requests_per_minute=6)
    limiter = KeyLimiter(clock=clock)
    for _ in range(6):
        chat(limiter, mine)
    assert refusal(limiter, mine).retry_after == "10"
    chat(limiter, other)
    clock.now += 10
    chat(limiter, mine)
    refusal(limiter, mine)


def test_tokens_are_counted_at_the_end_of_a_reply() -> None:
    clock, mine = Clock(), key(tokens_per_minute=600)
    limiter = KeyLimiter(clock=clock)
    chat(limiter, mine, tokens=700)
    assert limiter.headers(mine)["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(limiter, mine).retry_after == "10"
    clock.now += 10
    chat(limiter, mine)


def test_chats_at_once_are_counted() -> None:
    limiter, mine = KeyLimiter(), key(concurrency=2)
    with limiter.admit(mine), limiter.admit(mine):
        refusal(limiter, mine)
    chat(limiter, mine)


def test_gateways_share_a_limit_and_tell_the_whole() -> None:
    clock, mine = Clock(), key(requests_per_minute=6)
    limiter = KeyLimiter(gateways=2, clock=clock)
    for _ in range(3):
        chat(limiter, mine)
    refusal(limiter, mine)
    headers = KeyLimiter(gateways=2, clock=clock).headers(mine)
    assert headers["x-ratelimit-limit-requests"] == headers["x-ratelimit-remaining-requests"] == "6"


def test_a_key_without_limits_costs_nothing() -> None:
    limiter, mine = KeyLimiter(), key()
    with limiter.admit(mine):
        assert limiter.headers(mine) == {}


async def limited(gateway: Gateway, **limits: int) -> str:
    """A key with limits, set over HTTP."""
    secret = gateway.keys.add("default", frozenset({Scope.CHAT}))
    prefix = secret[: len("cl-00000000")]
    async with gateway.client(gateway.admin_key) as client:
        answer = await client.put(f"/admin/v1/keys/{prefix}/limits", json=limits)
        assert answer.status_code == 200, answer.text
        shown = await client.get(f"/admin/v1/keys/{prefix}/limits")
    assert {name: value for name, value in shown.json()["limits"].items() if value is not None} == limits
    return secret


async def test_a_key_over_its_limit_gets_429_with_the_headers(gateway: Gateway) -> None:
    secret = await limited(gateway, requests_per_minute=1, tokens_per_minute=1000)
    async with gateway.client(secret) as client:
        first = await client.post(PATH, json=chat_body())
        second = await client.post(PATH, json=chat_body())
        in_messages = await client.post(
            "/v1/messages", json=chat_body(max_tokens=5), headers={"anthropic-version": "2023-06-01"}
        )
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-tokens"] == "1000"  # before the reply's tokens were counted
    assert second.status_code == 429
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(second.headers["x-ratelimit-remaining-tokens"]) in range(991, 1000)
    assert in_messages.json()["error"]["type"] == "rate_limit_error"
    assert len(await gateway.recorded()) == 1
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=0) as sdk:
        with pytest.raises(openai.RateLimitError):
            await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])


async def test_a_chat_that_ends_frees_its_place(gateway: Gateway) -> None:
    secret = await limited(gateway, concurrency=1)
    gateway.engine.hold = asyncio.Event()
    async with gateway.client(secret) as client:
        held = asyncio.create_task(client.post(PATH, json=chat_body()))
        await until(lambda: gateway.engine.requests)
        refused = await client.post(PATH, json=chat_body())
        gateway.engine.hold.set()
        answered: httpx.Response = await held
        again = await client.post(PATH, json=chat_body())
    assert (refused.status_code, answered.status_code, again.status_code) == (429, 200, 200)


@pytest.mark.parametrize("body", [{"requests_per_minute": 0}, {"concurrency": "many"}, {"requests": 5}])
async def test_wrong_limits_are_refused(gateway: Gateway, body: Any) -> None:
    async with gateway.client(gateway.admin_key) as client:
        assert (await client.put("/admin/v1/keys/cl-00000000/limits", json=body)).status_code == 400
        assert (await client.put("/admin/v1/keys/cl-00000000/limits", json={})).status_code == 404


async def used(gateway: Gateway, secret: str) -> int:
    """The tokens that a key has used of 10^6 a minute, at least; what is refilled meanwhile is left out by rounding."""
    key = await gateway.services.keys.require(Headers({"authorization": f"Bearer {secret}"}), Scope.CHAT)
    return 10**6 - int(gateway.services.key_limits.headers(key)["x-ratelimit-remaining-tokens"])


@pytest.fixture
def still(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket is refilled."""
    monkeypatch.setattr(gateway.services.key_limits, "_clock", lambda: 1000.0)


@pytest.mark.parametrize("word", ["UNEVEN", "NOIDS", "BREAK", "hello"])
@pytest.mark.usefixtures("still")
async def test_tokens_that_are_not_recorded_count_as_well(gateway: Gateway, word: str) -> None:
    secret = await limited(gateway, tokens_per_minute=10**6)
    async with gateway.client(secret) as client:
        await client.post(PATH, json=chat_body(word, stream=True))
    # The prompt has three tokens and the reply six; of a broken one two came.
    assert await used(gateway, secret) == {"BREAK": 5, "NOIDS": 8}.get(word, 9)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.usefixtures("still")
async def test_a_client_that_leaves_has_used_what_the_engine_did(gateway: Gateway, stream: bool) -> None:
    secret = await limited(gateway, tokens_per_minute=10**6)
    gateway.engine.delay_seconds = 30
    words = "word " * 400
    answering = asyncio.Event()

    async def chat() -> None:
        async with client.stream("POST", PATH, json=chat_body(words, stream=stream)) as answer:
            async for _ in answer.aiter_lines():
                answering.set()

    async with gateway.client(secret) as client:
        leaving = asyncio.create_task(chat())
        await until(lambda: gateway.engine.requests)
        if stream:
            async with asyncio.timeout(30):
                await answering.wait()  # the first chunk, which has the prompt's tokens
        leaving.cancel()
        await asyncio.wait([leaving])
        await gateway.recorded(1)
    assert await used(gateway, secret) >= (3 if stream else len(words) // 4)


async def test_a_key_that_stores_as_much_as_it_may_gets_429(gateway: Gateway) -> None:
    secret = await limited(gateway, stored_mib=1)
    key = await gateway.services.keys.require(Headers({"authorization": f"Bearer {secret}"}), Scope.CHAT)
    gateway.keys.stored[key.id] = 2**20 - 1
    async with gateway.client(secret) as client, gateway.client() as other:
        assert (await client.post(PATH, json=chat_body())).status_code == 200
        gateway.keys.stored[key.id] = 2**20
        await gateway.stored.refresh()
        refused = await client.post(PATH, json=chat_body(stream=True))
        feedback = await client.post("/v1/feedback", json={"turn": "last", "text": "more"})
        allowed = await other.post(PATH, json=chat_body())
        gateway.keys.stored[key.id] = 0
        await gateway.stored.refresh()
        again = await client.post(PATH, json=chat_body())
    assert (refused.status_code, feedback.status_code, allowed.status_code, again.status_code) == (429, 429, 200, 200)
    assert refused.headers["retry-after"] == "60"
    assert refused.json()["error"]["code"] == "storage_limit_exceeded"
    assert "--stored-mib" in refused.json()["error"]["message"]
    assert len(await gateway.recorded()) == 3


async def test_keys_without_a_limit_of_their_own_have_that_of_all() -> None:
    store, mine, generous = FakeKeyStore(), key(), key(stored_mib=3)
    episode = dataclasses.replace(key(), episode=new_episode_id())
    bounded = StoredBytes(store, default_mib=1)
    store.stored = {one.id: 2 * 2**20 for one in (mine, generous, episode)}
    for one in (mine, generous, episode):
        bounded.require_room(one)  # nothing is known yet
    await bounded.refresh()
    with pytest.raises(RequestRejected, match="1 MiB"):
        bounded.require_room(mine)
    bounded.require_room(generous)
    bounded.require_room(episode)


async def test_a_bug_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    store, mine = FakeKeyStore(), key(stored_mib=1)
    store.stored = {mine.id: 2**20}
    read, failed = store.stored_bytes, asyncio.Event()

    async def fails_once(keys: Sequence[ApiKeyId]) -> dict[ApiKeyId, int]:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a bug")
        return await read(keys)

    monkeypatch.setattr("api.chat.key_limits.REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(store, "stored_bytes", fails_once)
    async with StoredBytes(store) as bounded:
        bounded.require_room(mine)
        await until(lambda: bounded._stored)
    assert failed.is_set()


async def test_a_new_key_is_looked_at_at_once_and_stays_known_while_postgresql_is_away() -> None:
    store, mine = FakeKeyStore(), key(stored_mib=1)
    store.stored = {mine.id: 2**20}
    async with StoredBytes(store) as bounded:
        bounded.require_room(mine)
        await until(lambda: bounded._stored)
        store.available = False
        with pytest.raises(StoreUnavailable):
            await bounded.refresh()
        with pytest.raises(RequestRejected):
            bounded.require_room(mine)
