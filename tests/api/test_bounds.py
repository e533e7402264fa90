"""Bounds of requests: what is refused, dropped, or limited for a key."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai import AsyncOpenAI
from starlette.datastructures import Headers

import api.http_protocol
from api.chat.fields import sort_fields
from api.chat.grammar_slots import GrammarSlots
from api.chat.key_limits import KeyLimiter, StoredBytes
from api.dependencies import Limits
from api.http_protocol import HEAD_BYTES, HEAD_LINES, BoundedHttpProtocol
from clawloop.core.contracts.serving import ApiKey, KeyLimits, Scope
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.core.ids import ApiKeyId, new_api_key_id, new_episode_id
from clawloop.core.settings import ChatBounds
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine
from tests.fakes.key_store import FakeKeyStore

# A request that costs the engine too much is refused; what only an engine's operator may set does not reach it.

BOUNDS = ChatBounds(
    messages=4,
    tools=2,
    grammar_bytes=400,
    schema_nodes=8,
    choices=3,
    regex_length=10,
    stop=2,
    stop_length=50,
    repetitions=20,
    token_ids=2,
    n=2,
    structured_requests=1,
)


def _message(parts: int = 0) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "x"}] * parts if parts else "x"}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def _schema(properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(properties)}}


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


TOO_COMPLEX: tuple[tuple[dict[str, Any], str], ...] = (
    ({"messages": [_message()] * 5}, "messages"),
    ({"messages": [_message(parts=4)]}, "messages"),
    ({"tools": [_tool()] * 3}, "tools"),
    ({"functions": [{"name": "f"}] * 3}, "functions"),
    ({"n": 3}, "n"),
    ({"stop": ["a", "b", "c"]}, "stop"),
    ({"bad_words": ["a", "b", "c"]}, "bad_words"),
    ({"stop": ["a" * 30, "b" * 30]}, "stop"),
    ({"stop": "a" * 60}, "stop"),
    ({"bad_words": ["a" * 60]}, "bad_words"),
    ({"structured_outputs": {"regex": "a{1,21}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "[ab]{21}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a?b*"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a{0,5}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a{3,21}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a{,9}b?"}}, "structured_outputs"),
    ({"response_format": _json_schema({"type": "string", "maxLength": 10**9})}, "response_format"),
    ({"response_format": _json_schema({"type": "string", "minLength": 21})}, "response_format"),
    (
        {"response_format": _json_schema({"anyOf": [{"pattern": "a{1,15}"}, {"type": "string", "maxLength": 9}]})},
        "response_format",
    ),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias"),
    ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids"),
    ({"structured_outputs": {"choice": ["a", "b", "c", "d"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 11}}, "structured_outputs"),
    ({"structured_outputs": {"type": "text", "choice": ["a", "b", "c", "d"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": json.dumps(_schema(9))}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "a" * 11}}, "structured_outputs"),
    ({"response_format": _json_schema({"patternProperties": {"a" * 11: {}}})}, "response_format"),
    ({"messages": [_message(), {"role": "assistant", "tool_calls": [{}] * 3}]}, "messages"),
    ({"documents": [{"text": "x"}] * 5}, "documents"),
    ({"guided_regex": "a" * 11}, "guided_regex"),
    ({"guided_choice": ["a", "b", "c", "d"]}, "guided_choice"),
    ({"guided_json": _schema(9)}, "guided_json"),
    ({"structured_outputs": {"grammar": "a" * 500}}, "structured_outputs"),
    ({"response_format": _json_schema(_schema(9))}, "response_format"),
    ({"response_format": _json_schema({"type": "string", "pattern": "a" * 11})}, "response_format"),
    ({"tools": [_tool(parameters=_schema(9))], "tool_choice": "required"}, "tools"),
    ({"tools": [_tool(parameters=_schema(9), strict=True)]}, "tools"),
)


async def test_each_bound_names_its_field(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], limits=Limits(chat=BOUNDS)) as gateway:
        async with gateway.client() as client:
            for number, (fields, field) in enumerate(TOO_COMPLEX, 1):
                refused = await client.post(PATH, json=chat_body() | fields)
                error = refused.json()["error"]
                expected = (400, "request_too_complex", field)
                assert (refused.status_code, error["code"], error["param"]) == expected, fields
                assert (await client.post(PATH, json=chat_body())).status_code == 200, fields
                assert len(engine.requests) == number, fields
                assert len(await gateway.recorded(number)) == number, fields


ALLOWED: tuple[dict[str, Any], ...] = (
    {"messages": [_message()] * 4},
    {"tools": [_tool(parameters=_schema(9))]},
    {"tools": [_tool(parameters=_schema(9))], "tool_choice": "none"},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a", "b", "c"]}},
    {"structured_outputs": {"regex": r"\?{2}a{18}"}},
    {"structured_outputs": {"regex": "(?:[?*])+"}},
    {"structured_outputs": {"regex": "a{0,4}"}},
    {"response_format": _json_schema({"anyOf": [{"type": "string", "maxLength": 20}] * 3})},
    {"stop": "one string is not a list of characters"},
)


async def test_what_is_within_the_bounds_reaches_the_engine(tmp_path: Path, engine: FakeEngine) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], limits=Limits(chat=BOUNDS)) as gateway,
        gateway.client() as client,
    ):
        for fields in ALLOWED:
            assert (await client.post(PATH, json=chat_body() | fields)).status_code == 200, fields
            for name, value in fields.items():
                assert engine.requests[-1][name] == value, fields


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"guided_grammar": 'root ::= "a"'},
        {"structured_outputs": {"structural_tag": json.dumps({"format": {"type": "grammar", "grammar": "x"}})}},
    ],
)
async def test_grammars_of_clients_need_the_operators_leave(
    tmp_path: Path, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    for allowed in (False, True):
        limits = Limits(chat=ChatBounds(free_grammars=allowed))
        async with running_gateway(tmp_path, engines=[engine], limits=limits) as gateway, gateway.client() as client:
            answer = await client.post(PATH, json=chat_body() | fields)
        assert answer.status_code == (200 if allowed else 400)
        assert allowed or "CLAWLOOP_CHAT_BOUNDS__FREE_GRAMMARS" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    ["kv_transfer_params", "ec_transfer_params", "request_id", "priority", "truncate_prompt_tokens", "lora_request"],
)
async def test_an_engines_own_fields_are_refused_by_name(gateway: Gateway, name: str) -> None:
    async with gateway.client() as client:
        refused = await client.post(PATH, json=chat_body() | {name: 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
    assert not gateway.engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_without_use_are_dropped_and_named(gateway: Gateway, stream: bool) -> None:
    async with gateway.client() as client:
        answer = await client.post(
            PATH, json=chat_body(stream=stream, store=True, verbosity="low", metadata={}, top_k=3)
        )
    assert answer.headers["X-Clawloop-Ignored"] == "metadata, store, verbosity"
    assert gateway.engine.requests[0]["top_k"] == 3
    assert not {"store", "verbosity", "metadata"} & set(gateway.engine.requests[0])


async def test_a_request_without_such_fields_has_no_such_header(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(session_id="s", temperature=1))
    assert "X-Clawloop-Ignored" not in answer.headers


def test_the_operator_lets_fields_through() -> None:
    assert sort_fields({"priority": 1, "mine": 2}, ["priority", "mine"]).engine == {"priority": 1, "mine": 2}
    with pytest.raises(RequestRejected, match="CLAWLOOP_ENGINE_FIELDS"):
        sort_fields({"priority": 1}, ["mine"])


def test_names_that_a_header_cannot_hold_are_dropped_without_a_word() -> None:
    fields = {"é": 1, "a\r\nX-Forged: 1": 1, "x" * 100: 1, "fine": 1}
    assert sort_fields(fields).ignored == ("fine",)


async def test_a_client_that_leaves_does_not_free_its_slot_while_the_engine_compiles() -> None:
    slots, key = GrammarSlots(1, 8, wait_seconds=0.05, compile_seconds=1), new_api_key_id()

    async def leave() -> None:
        async with slots.slot(key) as slot:
            await slot.on("e0")
            await asyncio.sleep(60)

    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    with pytest.raises(RequestRejected, match="wait for their grammar"):
        async with slots.slot(key):
            pass
    await asyncio.sleep(1)  # by now it is compiled
    async with slots.slot(key) as slot:
        await slot.on("e0")


async def test_a_slot_is_held_no_longer_than_a_grammar_takes() -> None:
    slots, key = GrammarSlots(1, 8, wait_seconds=5, compile_seconds=0.05), new_api_key_id()
    async with slots.slot(key) as first:  # as two answers that are not streamed
        await first.on("e0")
        async with slots.slot(key) as second:
            await second.on("e0")
    impatient = GrammarSlots(1, 8, wait_seconds=0.05, compile_seconds=60)
    for _ in range(2):  # freed once at its end, not twice
        async with impatient.slot(key) as slot:
            await slot.on("e0")
            with pytest.raises(RequestRejected):
                async with impatient.slot(key):
                    pass


async def test_a_slot_goes_with_its_request_to_the_next_engine() -> None:
    slots, key, other = GrammarSlots(1, 1, wait_seconds=0.05, compile_seconds=60), new_api_key_id(), new_api_key_id()
    async with slots.slot(key) as slot, slots.slot(other) as further:
        await slot.on("e0")
        await slot.on("e1")  # e0 broke off
        with pytest.raises(RequestRejected):
            await further.on("e1")
        await further.on("e0")
    async with slots.slot(key) as slot:
        await slot.on("e1")


async def test_time_does_not_run_for_a_request_while_those_before_it_wait_for_an_engine() -> None:
    slots, key = GrammarSlots(1, 8, wait_seconds=0.2, compile_seconds=60), new_api_key_id()

    async def ask() -> None:
        async with slots.slot(key):
            pass

    async with slots.slot(key) as slot:
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await slot.on("e0")
        with pytest.raises(RequestRejected, match="wait for their grammar"):
            await waiting


async def test_a_key_holds_as_many_grammars_as_it_may_and_another_key_is_not_held(
    tmp_path: Path, engine: FakeEngine
) -> None:
    structured = chat_body(structured_outputs={"choice": ["a"]})
    async with running_gateway(tmp_path, engines=[engine], limits=Limits(chat=BOUNDS)) as gateway:
        engine.hold = asyncio.Event()
        async with gateway.client() as client, gateway.client(gateway.keys.add("default", {Scope.CHAT})) as other:
            first = asyncio.create_task(client.post(PATH, json=structured))
            await until(lambda: len(engine.requests) == 1)
            refused = await client.post(PATH, json=structured)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_structured_requests")
            assert float(refused.headers["Retry-After"]) >= 0
            others = [
                asyncio.create_task(client.post(PATH, json=chat_body())),
                asyncio.create_task(other.post(PATH, json=structured)),
            ]
            await until(lambda: len(engine.requests) == 3)
            engine.hold.set()
            assert {answer.status_code for answer in await asyncio.gather(first, *others)} == {200}
            assert (await client.post(PATH, json=structured)).status_code == 200
        assert len(await gateway.recorded(4)) == 4


async def test_grammars_of_a_key_that_wait_for_an_engine_are_all_answered(tmp_path: Path, engine: FakeEngine) -> None:
    structured = chat_body(structured_outputs={"choice": ["a"]})
    engine.healthy = False
    limits, wait_seconds = Limits(chat=BOUNDS), 2.0  # on a busy machine the first answer takes a part of it
    async with (
        running_gateway(
            tmp_path, engines=[engine], limits=limits, hold_seconds=60, grammar_seconds=wait_seconds
        ) as gateway,
        gateway.client() as client,
    ):
        asked = [asyncio.create_task(client.post(PATH, json=structured)) for _ in range(2)]
        registry = gateway.services.metrics.registry
        await until(lambda: registry.get_sample_value("clawloop_gateway_requests_held") == 1)
        await asyncio.sleep(1.2 * wait_seconds)  # longer than a request waits for the grammars before it
        engine.healthy = True
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_grammars_of_a_key_that_wait_for_others_keep_no_place_on_the_engine(
    tmp_path: Path, engine: FakeEngine
) -> None:
    structured = chat_body(structured_outputs={"choice": ["a"]})
    limits = Limits(chat=BOUNDS)
    async with running_gateway(tmp_path, engines=[engine], limits=limits, places=2, grammar_seconds=60) as gateway:
        engine.hold = asyncio.Event()
        async with gateway.client() as client, gateway.client(gateway.keys.add("default", {Scope.CHAT})) as other:
            slow = [asyncio.create_task(client.post(PATH, json=structured)) for _ in range(3)]
            await until(lambda: len(engine.requests) == 1)
            waiting = gateway.services.grammar_slots._by_key
            await until(lambda: sum(len(of_key._waiting) for of_key in waiting.values()) == 2)
            plain = asyncio.create_task(other.post(PATH, json=chat_body()))
            await until(lambda: len(engine.requests) == 2)
            engine.hold.set()
            assert {answer.status_code for answer in await asyncio.gather(*slow, plain)} == {200}


# Bad input gets its status and a message with field and remedy; nothing is recorded, the next request is served.

GOOD = chat_body()


def _without(field: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != field}


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"{not json", 400, "invalid_json", "not JSON"),
        (b"", 400, "invalid_json", "not JSON"),
        (b'{"model": "policy", "messages": "\xff\xfe"}', 400, "invalid_json", "UTF-8"),
        (b'"text"', 400, "invalid_json", "JSON object"),
        (b"[" * 100_000, 400, "invalid_json", "not JSON"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "model": ' + b"[" * 300 + b"]" * 300 + b"}",
            400,
            "invalid_json",
            "nested too deeply",
        ),
        (GOOD | {"metadata": orjson.loads(b'{"a": ' * 128 + b"1" + b"}" * 128)}, 400, "invalid_json", "128 levels"),
        (GOOD | {"metadata": orjson.loads(b"[" * 127 + b"]" * 127)}, 400, "invalid_value", "`metadata`"),
        (_without("model"), 400, "missing_required_parameter", "`model`"),
        (_without("messages"), 400, "missing_required_parameter", "`messages`"),
        (_without("messages") | {"message": []}, 400, "missing_required_parameter", "`message`"),
        (GOOD | {"messages": []}, 400, "invalid_value", "`messages`"),
        (GOOD | {"messages": "hi"}, 400, "invalid_value", "`messages`"),
        (GOOD | {"messages": [{"content": "hi"}]}, 400, "missing_required_parameter", "`messages.0.role`"),
        (GOOD | {"messages": [{"role": "wizard"}]}, 400, "invalid_value", "`messages.0.role`"),
        (GOOD | {"messages": ["hi"]}, 400, "invalid_value", "`messages.0`"),
        (GOOD | {"stream": "yes"}, 400, "invalid_value", "`stream`"),
        (GOOD | {"n": 0}, 400, "invalid_value", "`n`"),
        (GOOD | {"n": 10_000}, 400, "invalid_value", "`n`"),
        (GOOD | {"temperature": "hot"}, 400, "invalid_value", "`temperature`"),
        (GOOD | {"temperature": 3}, 400, "invalid_value", "`temperature`"),
        (GOOD | {"tools": "exec"}, 400, "invalid_value", "`tools`"),
        (GOOD | {"session_id": 7}, 400, "invalid_value", "`session_id`"),
        (GOOD | {"metadata": "x"}, 400, "invalid_value", "`metadata`"),
        (GOOD | {"model": "gpt-5"}, 404, "model_not_found", "`policy`"),
        (GOOD | {"model": "default-v7"}, 404, "model_not_found", "default-v7"),
        (GOOD | {"model": 5}, 400, "invalid_value", "`model`"),
    ],
)
async def test_a_bad_body_is_refused_with_field_and_remedy(
    gateway: Gateway, body: Any, status: int, code: str, message: str
) -> None:
    async with gateway.client() as client:
        answer = await (client.post(PATH, content=body) if isinstance(body, bytes) else client.post(PATH, json=body))
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == code
        assert message in error["message"]
        assert "Traceback" not in answer.text
        assert (await client.post(PATH, json=GOOD)).status_code == 200
    assert len(await gateway.recorded()) == 1
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize(
    ("header", "message"),
    [(None, "Bearer KEY"), ("Basic abc", "Bearer KEY"), ("Bearer", "Bearer KEY"), ("Bearer cl-nope", "not known")],
)
async def test_a_missing_or_invalid_key_is_401(gateway: Gateway, header: str | None, message: str) -> None:
    async with gateway.client() as client:
        if header is None:
            del client.headers["Authorization"]
        else:
            client.headers["Authorization"] = header
        answer = await client.post(PATH, json=GOOD)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert message in answer.json()["error"]["message"]
    assert not gateway.engine.requests


async def test_a_key_without_the_scope_is_403(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        assert (await client.post(PATH, json=GOOD)).status_code == 403
        engines = await client.get("/admin/v1/engines")
        assert engines.json()["engines"][0]["id"] == "e0"
    async with gateway.client() as client:
        refused = await client.get("/admin/v1/engines")
    assert refused.status_code == 403
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["status"] == 403
    assert "admin" in refused.json()["detail"]


async def test_a_body_over_the_limit_is_413_and_the_client_gets_the_answer(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[engine], limits=Limits(body_bytes=1024 * 1024)) as gateway:
        big = GOOD | {"messages": [{"role": "user", "content": "x" * 50 * 1024 * 1024}]}
        async with gateway.client() as client:
            answer = await client.post(PATH, json=big)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert "1 MiB" in answer.json()["error"]["message"]
            assert (await client.post(PATH, json=GOOD)).status_code == 200


async def test_a_body_that_arrives_too_slowly_is_408(engine: FakeEngine, tmp_path: Path) -> None:
    async def slowly() -> Any:
        yield b'{"model": '
        await asyncio.sleep(1)

    async with (
        running_gateway(tmp_path, engines=[engine], limits=Limits(upload_seconds=0.2)) as gateway,
        gateway.client() as client,
    ):
        answer = await client.post(PATH, content=slowly())
    assert answer.status_code == 408


@pytest.mark.parametrize(("path", "method", "status"), [("/v1/nothing", "GET", 404), (PATH, "GET", 405)])
async def test_unknown_routes_and_methods_answer_in_openais_shape(
    gateway: Gateway, path: str, method: str, status: int
) -> None:
    async with gateway.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost:30000"}, 200),
        ({"Host": "[::1]:30000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://203.0.113.9"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:5173"}, 200),
    ],
)
async def test_foreign_hosts_and_origins_are_refused(gateway: Gateway, headers: dict[str, str], status: int) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=GOOD, headers=headers)
    assert answer.status_code == status


# The head of an HTTP request is bounded in bytes, lines and time, whatever comes before or after it.

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


async def _send(gateway: Gateway, *parts: bytes, close: bool = False) -> bytes:
    """What the gateway answers until it closes the connection."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionResetError:  # it closed while more was being sent
        return b""
    finally:
        writer.close()


def _status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def _code(answer: bytes) -> str:
    code: str = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"]
    return code


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X-Large: " + b"x" * HEAD_BYTES,
        b"GET /" + b"x" * HEAD_BYTES,
        GET + b"".join(b"X-%d: 1\r\n" % n for n in range(HEAD_LINES)) + b"\r\n",
        GET + b"a:\r\n" * (HEAD_BYTES // 8) + b"\r\n",
    ],
    ids=["one large header", "a long address", "many headers", "empty headers"],
)
async def test_a_large_head_is_431(gateway: Gateway, head: bytes) -> None:
    answer = await _send(gateway, head)
    assert (_status(answer), _code(answer)) == (431, "headers_too_large")


async def test_a_flood_of_headers_is_cut_off(gateway: Gateway) -> None:
    await _send(gateway, GET + b"X-Large: ", *[b"x" * 65_536] * 100)
    async with gateway.client() as client:
        assert (await client.get("/healthz")).status_code == 200


async def test_a_head_of_the_largest_size_is_served(gateway: Gateway) -> None:
    line, end = GET + b"Connection: close\r\nX-Large: ", b"\r\n\r\n"
    answer = await _send(gateway, line + b"x" * (HEAD_BYTES - len(line + end)) + end)
    assert _status(answer) == 200


async def test_as_many_headers_as_allowed_are_served(gateway: Gateway) -> None:
    more = b"".join(b"X-%d: 1\r\n" % n for n in range(HEAD_LINES - 2))
    assert _status(await _send(gateway, GET + more + b"Connection: close\r\n\r\n")) == 200


async def test_a_body_is_not_counted_and_neither_is_the_request_before(gateway: Gateway) -> None:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x" * 3 * HEAD_BYTES}]}).encode()
    chat = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + gateway.key.encode()
    chat += b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    padded = GET + b"X-Large: " + b"x" * (HEAD_BYTES // 2) + b"\r\n\r\n"
    answer = await _send(gateway, chat + body + padded + padded + GET + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 4


async def test_a_head_that_arrives_slowly_is_408(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 0.1)
    for parts in ([GET], [], [b"\r\n"], [GET + b"\r\n", GET]):
        answer = await _send(gateway, *parts)
        assert answer.endswith(b'"code":"upload_timeout"}}'), parts


async def test_a_slow_second_head_does_not_cut_the_first_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 0.05)
    gateway.engine.delay_seconds = 0.05
    body = json.dumps({"model": "policy", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    chat = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + gateway.key.encode()
    chat += b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await _send(gateway, chat, body + b"\r\n")
    assert b"[DONE]" in answer


async def test_a_flood_behind_a_body_is_cut_off(gateway: Gateway) -> None:
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = 0
    with suppress(ConnectionError):
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post + b"0\r\nX-Trailer: ")
        for _ in range(200):
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 1
    assert sent < 200


async def test_a_body_that_never_ends_is_closed_after_its_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 0.1)
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    answer = await _send(gateway, post, b"x")  # without a key; returns once the connection is closed
    assert _status(answer) == 401


async def test_what_is_not_http_is_400(gateway: Gateway) -> None:
    answer = await _send(gateway, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello")
    assert (_status(answer), _code(answer)) == (400, "invalid_http")


async def test_two_host_headers_are_400(gateway: Gateway) -> None:
    answer = await _send(gateway, GET + b"Host: evil.example\r\nConnection: close\r\n\r\n")
    assert (_status(answer), _code(answer)) == (400, "invalid_http")


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_takes_nothing_of_its_answers_is_cut_off(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(api.http_protocol, "STALLED_SECONDS", 2.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    many = 200  # 50 MB of answers: more than the kernel keeps for a connection, and 4 s with the pauses
    ended = threading.Event()
    lost = BoundedHttpProtocol.connection_lost

    def lose(protocol: BoundedHttpProtocol, error: Exception | None) -> None:
        lost(protocol, error)
        ended.set()

    monkeypatch.setattr(BoundedHttpProtocol, "connection_lost", lose)
    with socket.socket() as client:
        client.settimeout(20)
        client.connect((host, int(port)))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * many)
        assert reads or await asyncio.to_thread(ended.wait, 120)
        received = await asyncio.to_thread(_answers, client, many, 0.02 if reads else 0)
    assert (received == many) is reads


def _answers(client: socket.socket, most: int, pause_seconds: float) -> int:
    """How many answers begin before the connection ends, or so many have."""
    begin = b"HTTP/1.1 200 OK"
    begun, rest = 0, b""
    with suppress(ConnectionResetError):
        while begun < most and (data := client.recv(2**18)):
            begun += (rest + data).count(begin)
            rest = (rest + data)[1 - len(begin) :]
            time.sleep(pause_seconds)
    return begun


# Limits of a key: refused with 429 in time, counted by bucket, shared by gateways.


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
