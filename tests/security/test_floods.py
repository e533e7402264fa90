"""What strangers and single keys send to exhaust a gateway's memory, time or connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from api.app import create_app
from api.auth import KeyRing
from api.chat import key_limits
from api.chat.key_limits import KeyLimiter
from api.dependencies import Limits
from api.request_body import BodyRoom
from clawloop.app.processes.gateway import GatewayReadiness
from clawloop.core.contracts.serving import ApiKey, KeyLimits
from clawloop.core.contracts.serving import Scope as KeyScope
from clawloop.core.errors import RequestRejected
from clawloop.core.ids import new_api_key_id
from clawloop.core.settings import ChatBounds
from db.database import Database
from db.schema import revisions
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import fake_engine
from tests.fakes.key_store import FakeKeyStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    async with fake_engine() as engine, running_gateway(folder, engines=[engine]) as running:
        yield running


async def test_a_stranger_sends_no_large_body(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answer = await client.post("/ui/login", content=b"key=" + b"x" * 10_000)
    assert answer.status_code == 413
    assert "4 KiB" in answer.text


def test_no_route_leaves_its_body_to_the_framework_which_reads_it_before_the_key() -> None:
    routes = [route for route in create_app(nullcontext).routes if isinstance(route, APIRoute)]  # type: ignore[arg-type]
    assert len(routes) > 100
    assert [route.path for route in routes if route.body_field is not None] == []


async def test_nobody_waits_for_the_body_of_a_stranger(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    bodies = [(verb, path) for path, verbs in paths.items() for verb, one in verbs.items() if "requestBody" in one]
    assert len(bodies) > 20
    url = httpx.URL(gateway.url)
    for verb, path in bodies:
        sent = re.sub(r"\{[^}]*\}", "0" * 64, path)
        head = f"{verb.upper()} {sent} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 1000\r\n\r\n"
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head.encode())
            status = await reader.readline()
            writer.close()
        assert status.split()[1] == b"401", path


@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages", "/v1/completions", "/v1/feedback"])
async def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(gateway: Gateway, path: str) -> None:
    body = b'{"model":"policy","messages":[{"role":"user","content":"hi"}],"x":[' + b"[]," * 1_000_000 + b"0]}"
    async with gateway.client() as client:
        answer = await client.post(path, content=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 400
    assert "2000007 commas and opening brackets, at most 1000000" in answer.text


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    (PATH, {"messages": [0, 0]}, "messages.0"),
    (PATH, {"messages": [{"role": "user", "content": "hi"}], "tools": [0, 0]}, "tools.0"),
    ("/v1/messages", {"max_tokens": 5, "messages": [0, 0]}, "messages.0"),
    ("/v1/messages", {"max_tokens": 5, "messages": [{}], "stop_sequences": [0, 0]}, "stop_sequences.0"),
    ("/v1/responses", {"input": "hi", "tools": [0, 0]}, "tools.0"),
    ("/v1/responses", {"input": "hi", "include": [0, 0]}, "include.0"),
)


@pytest.mark.parametrize(("path", "fields", "blamed"), WRONG)
async def test_the_first_wrong_entry_of_a_list_ends_its_validation(
    gateway: Gateway, path: str, fields: dict[str, Any], blamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import errors
    from api.chat import schemas
    from api.wire import reading

    counts: list[int] = []

    def counted(error: Any) -> tuple[str, str]:
        counts.append(error.error_count())
        return errors.first_invalid_field(error)

    for module in (schemas, reading):
        monkeypatch.setattr(module, "first_invalid_field", counted)
    async with gateway.client() as client:
        answer = await client.post(path, json={"model": "policy"} | fields, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 400
    assert blamed in answer.text
    assert counts == [1]


async def test_one_key_holds_a_share_of_the_memory_for_bodies() -> None:
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await release.wait()

    async def ask(who: str, size: int) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * size}

        async def send(_: Message) -> None:
            raise AssertionError

        headers = [(b"authorization", f"Bearer {who}".encode())]
        await room({"type": "http", "path": "/v1/chat/completions", "headers": headers}, receive, send)

    room = BodyRoom(app, total_bytes=150, share_bytes=100)
    held = asyncio.create_task(ask("mine", 60))
    await asyncio.sleep(0)
    with pytest.raises(RequestRejected, match="exceed 0 MiB") as raised:
        await ask("mine", 50)
    assert (raised.value.status, raised.value.code) == (429, "too_many_large_requests")
    other = asyncio.create_task(ask("other", 80))
    await asyncio.sleep(0)
    with pytest.raises(RequestRejected):
        await ask("third", 20)
    release.set()
    await asyncio.gather(held, other)
    await ask("mine", 100)
    assert not room._held


ONE_KEY: tuple[tuple[str, str], ...] = (
    ("Bearer mine", ""),
    ("bearer mine", ""),
    ("Bearer   mine ", ""),
    ("Bearer mine", "another, which nobody reads"),
    ("", "mine"),
    ("Basic bWluZQ==", " mine "),
)


@pytest.mark.parametrize(("authorization", "x_api_key"), ONE_KEY)
async def test_a_key_has_one_share_however_it_is_written(authorization: str, x_api_key: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await release.wait()

    async def ask(authorization: str, x_api_key: str) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * 60}

        async def send(_: Message) -> None:
            raise AssertionError

        sent = {"authorization": authorization, "x-api-key": x_api_key}
        headers = [(name.encode(), value.encode()) for name, value in sent.items() if value]
        await room({"type": "http", "path": "/v1/chat/completions", "headers": headers}, receive, send)

    release = asyncio.Event()
    room = BodyRoom(app, total_bytes=1000, share_bytes=100)
    held = asyncio.create_task(ask("Bearer mine", ""))
    await asyncio.sleep(0)
    with pytest.raises(RequestRejected, match="Send fewer at once"):
        async with asyncio.timeout(5):
            await ask(authorization, x_api_key)
    release.set()
    await held


async def test_a_body_over_a_keys_share_is_refused_in_the_form_of_its_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyRoom.__init__, "__defaults__", (10_000, 1000))
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine]) as gateway:
        engine.hold = asyncio.Event()
        async with gateway.client() as client:
            held = asyncio.create_task(client.post(PATH, json=chat_body("x" * 600)))
            await until(lambda: engine.requests)
            refused = await client.post(PATH, json=chat_body("x" * 600))
            engine.hold.set()
            assert (await held).status_code == 200
            again = await client.post(PATH, json=chat_body("x" * 600))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert refused.json()["error"]["code"] == "too_many_large_requests"
    assert again.status_code == 200


class SlowStore(FakeKeyStore):
    """Counts the look-ups that run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.running = self.most = 0

    async def authenticate(self, secret: str) -> ApiKey | None:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        return await super().authenticate(secret)


COUNTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ("/v1/messages/count_tokens", {"messages": chat_body()["messages"], "system": "x" * 2000}, "messages"),
    (
        "/v1/messages/count_tokens",
        {"messages": chat_body()["messages"], "tools": [{"name": "a", "input_schema": {"x" * 2000: 1}}]},
        "tools",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": chat_body()["messages"], "chat_template_kwargs": {"documents": ["x" * 2000]}},
        "chat_template_kwargs",
    ),
    ("/v1/responses/input_tokens", {"input": "x" * 2000}, "input"),
)


@pytest.mark.parametrize(("path", "body", "field"), COUNTS)
async def test_no_long_text_is_counted(path: str, body: dict[str, Any], field: str, tmp_path: Path) -> None:
    limits = Limits(chat=ChatBounds(counted_characters=1999))
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], limits=limits) as gateway:
        async with gateway.client() as client:
            headers = {"anthropic-version": "2023-06-01"}
            answer = await client.post(path, json={"model": "policy"} | body, headers=headers)
            assert answer.status_code == 400
            assert f"`{field}`: " in answer.json()["error"]["message"]
            assert "at most 1999 are accepted" in answer.json()["error"]["message"]
            image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K" * 300}
            content = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": image}]
            seen = {"model": "policy", "messages": [{"role": "user", "content": content}]}
            assert (await client.post(COUNTS[0][0], json=seen, headers=headers)).status_code == 200
        assert len(engine.requests) == 1


async def test_a_key_counts_tokens_one_request_at_a_time_and_within_its_limit(tmp_path: Path) -> None:
    path, body = "/v1/messages/count_tokens", {"model": "policy", "messages": chat_body()["messages"]}
    headers = {"anthropic-version": "2023-06-01"}
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine]) as gateway:
        engine.hold = asyncio.Event()
        mine, other = (gateway.keys.add("default", {KeyScope.CHAT}) for _ in range(2))
        await gateway.keys.set_limits(mine[: len("cl-00000000")], KeyLimits(requests_per_minute=1))
        async with gateway.client(mine) as busy, gateway.client(other) as client:
            many = [asyncio.create_task(busy.post(path, json=body, headers=headers)) for _ in range(5)]
            await until(lambda: len(engine.requests) == 1)
            one = asyncio.create_task(client.post(path, json=body, headers=headers))
            await until(lambda: len(engine.requests) == 2)
            assert not any(task.done() for task in many)
            engine.hold.set()
            assert (await one).status_code == 200
            statuses = [answer.status_code for answer in await asyncio.gather(*many)]
        assert sorted(statuses) == [200, 429, 429, 429, 429]
        assert gateway.turns.records == []


async def test_a_count_that_waits_too_long_for_others_of_its_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limits, "COUNT_SECONDS", 0.05)
    limiter = KeyLimiter()
    mine = ApiKey(new_api_key_id(), "default", frozenset({KeyScope.CHAT}))
    async with limiter.admit_count(mine):
        with pytest.raises(RequestRejected, match="one request at a time") as refused:
            async with limiter.admit_count(mine):
                pass
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    async with limiter.admit_count(mine):
        pass


async def test_made_up_keys_leave_connections_to_others() -> None:
    store = SlowStore()
    store.gate.set()
    secret = store.add("default", {KeyScope.CHAT})
    keys = KeyRing(store)
    headers = Headers({"authorization": f"Bearer {secret}"})
    await keys.require(headers, KeyScope.CHAT)
    store.gate.clear()
    made_up = [
        asyncio.create_task(keys.require(Headers({"authorization": f"Bearer cl-{n}"}), KeyScope.CHAT))
        for n in range(50)
    ]
    await until(lambda: store.running)
    await asyncio.sleep(0)
    assert (store.running, store.most) == (4, 4)
    assert (await keys.require(headers, KeyScope.CHAT)).policy == "default"
    store.gate.set()
    refused = await asyncio.gather(*made_up, return_exceptions=True)
    assert {type(one) for one in refused} == {RequestRejected}
    assert store.most == 4


async def test_all_that_ask_whether_a_gateway_is_ready_share_one_question() -> None:
    asked, gate = 0, asyncio.Event()

    class Slow(Database):
        def __init__(self) -> None:
            pass

        async def run(self, work: Any) -> Any:
            nonlocal asked
            asked += 1
            await gate.wait()
            return revisions()[0]

    readiness = GatewayReadiness(Slow(), _Healthy(), tuple, lambda: False)  # type: ignore[arg-type]
    asking = [asyncio.create_task(readiness.problems()) for _ in range(20)]
    await until(lambda: asked)
    asking[0].cancel()  # the client left
    gate.set()
    answers = await asyncio.gather(*asking[1:])
    assert answers == [[]] * 19
    assert asked == 1
    assert await readiness.problems() == []
    assert asked == 2


class _Healthy:
    def healthy(self) -> list[str]:
        return ["e0"]
