"""A request that costs the engine too much is refused; what only an engine's operator may set does not reach it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from api.chat.fields import sort_fields
from api.chat.grammar_slots import GrammarSlots
from api.dependencies import Limits
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import RequestRejected
from clawloop.core.ids import new_api_key_id
from clawloop.core.settings import ChatBounds
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine

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


@pytest.mark.parametrize(
    ("fields", "field"),
    [
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
    ],
)
async def test_each_bound_names_its_field(
    tmp_path: Path, engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    async with running_gateway(tmp_path, engines=[engine], limits=Limits(chat=BOUNDS)) as gateway:
        async with gateway.client() as client:
            refused = await client.post(PATH, json=chat_body() | fields)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (400, "request_too_complex", field)
            assert (await client.post(PATH, json=chat_body())).status_code == 200
        assert len(engine.requests) == 1
        assert len(await gateway.recorded()) == 1


@pytest.mark.parametrize(
    "fields",
    [
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
    ],
)
async def test_what_is_within_the_bounds_reaches_the_engine(
    tmp_path: Path, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], limits=Limits(chat=BOUNDS)) as gateway,
        gateway.client() as client,
    ):
        assert (await client.post(PATH, json=chat_body() | fields)).status_code == 200
    for name, value in fields.items():
        assert engine.requests[0][name] == value


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
