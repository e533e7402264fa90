"""What clients write carelessly, or in another API's form, reaches the engine as what it means, in every format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Gateway

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
BY_API: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
    MESSAGES: {"messages": USER, "max_tokens": 6, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
}
BARE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    MESSAGES: {"messages": USER, "max_tokens": 6},
    RESPONSES: {"input": "hi"},
}
NAMED = {"type": "function", "function": {"name": "f"}}


async def post(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    async with gateway.client() as client:
        # As JavaScript writes a lone surrogate.
        answer = await client.post(path, content=json.dumps({"model": "policy"} | body), headers=headers)
    return answer.status_code, answer.json()


async def sent(gateway: Gateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The engine's request."""
    status, answer = await post(gateway, path, body)
    assert status == 200, answer
    return gateway.engine.requests[-1]


async def refused(gateway: Gateway, path: str, body: dict[str, Any]) -> str:
    before = len(gateway.engine.requests)
    status, answer = await post(gateway, path, body)
    assert (status, len(gateway.engine.requests)) == (400, before)
    return str(answer["error"]["message"])


@pytest.mark.parametrize("path", BY_API)
@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, None),
        ({}, None),
        ({"type": "auto"}, None),
        ({"type": "none"}, "none"),
        ("required", "required"),
        ("any", "required"),
        ({"type": "any"}, "required"),
        (NAMED, NAMED),
        ({"type": "function", "name": "f"}, NAMED),
    ],
)
async def test_a_choice_of_tools_is_understood_in_every_apis_form(
    gateway: Gateway, path: str, choice: Any, meant: Any
) -> None:
    found = (await sent(gateway, path, BY_API[path] | {"tool_choice": choice})).get("tool_choice")
    assert found == meant or (meant is None and found == "auto")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
    ],
)
async def test_tools_that_are_not_allowed_do_not_reach_the_engine(gateway: Gateway, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}
    body = BY_API[CHAT] | {"tools": [*BY_API[CHAT]["tools"], other], "tool_choice": choice}
    found = await sent(gateway, CHAT, body)
    assert [tool["function"]["name"] for tool in found["tools"]] == ["f"]
    assert found["tool_choice"] == "required"
    assert "none of the allowed tools" in await refused(gateway, CHAT, body | {"tools": [other]})


async def test_a_call_of_anthropics_form_is_wanted_in_a_chat(gateway: Gateway) -> None:
    found = await sent(gateway, CHAT, BY_API[CHAT] | {"tool_choice": {"type": "tool", "name": "f"}})
    assert found["tool_choice"] == NAMED
    assert "`tool_choice`: it is auto" in await refused(gateway, CHAT, BY_API[CHAT] | {"tool_choice": 5})


@pytest.mark.parametrize("path", BARE)
@pytest.mark.parametrize("choice", ["auto", "none", {"type": "auto"}, {"type": "none"}, None, {}])
async def test_a_choice_without_tools_says_nothing(gateway: Gateway, path: str, choice: Any) -> None:
    given: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": None}]
    for more in given:
        found = await sent(gateway, path, BARE[path] | {"tool_choice": choice} | more)
        assert "tool_choice" not in found
        assert "tools" not in found


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"name": "f", "input_schema": SCHEMA},
        {"function": {"name": "f", "parameters": SCHEMA}},
    ],
)
async def test_a_function_is_understood_in_every_apis_form(gateway: Gateway, tool: dict[str, Any]) -> None:
    assert (await sent(gateway, CHAT, {"messages": USER, "tools": [tool]}))["tools"] == BY_API[CHAT]["tools"]


@pytest.mark.parametrize("tool", [{}, {"type": "web_search"}, {"type": "function", "function": None}])
async def test_what_is_no_function_is_refused_by_its_place(gateway: Gateway, tool: dict[str, Any]) -> None:
    said = await refused(gateway, CHAT, {"messages": USER, "tools": [*BY_API[CHAT]["tools"], tool]})
    assert "`tools.1`" in said


async def test_a_tool_of_messages_without_a_schema_takes_nothing(gateway: Gateway) -> None:
    found = await sent(gateway, MESSAGES, BARE[MESSAGES] | {"tools": [{"name": "f"}]})
    assert found["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("stop", "meant"), [("", None), ([], None), ([""], None), (["x", None, "", "x"], ["x"]), ("x", "x"), (None, None)]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_what_stops_nothing_is_left_out(gateway: Gateway, path: str, stop: Any, meant: Any) -> None:
    asked = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    assert (await sent(gateway, path, asked | {"stop": stop})).get("stop") == meant


async def test_stop_sequences_may_be_one_string(gateway: Gateway) -> None:
    assert (await sent(gateway, MESSAGES, BARE[MESSAGES] | {"stop_sequences": "x"}))["stop"] == ["x"]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}),
    ],
)
async def test_a_schema_needs_no_name(gateway: Gateway, path: str, given: dict[str, Any]) -> None:
    found = (await sent(gateway, path, BARE[path] | given))["response_format"]["json_schema"]
    assert (found["schema"], found["name"]) == (SCHEMA, "response")


async def test_a_format_that_says_nothing_is_none(gateway: Gateway) -> None:
    assert "response_format" not in await sent(gateway, CHAT, BARE[CHAT] | {"response_format": {}})
    assert "response_format" not in await sent(gateway, RESPONSES, BARE[RESPONSES] | {"text": {"format": {}}})
    for wrong in ("json", {"type": "regex"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        assert "`response_format`: it is text" in await refused(gateway, CHAT, BARE[CHAT] | {"response_format": wrong})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_no_limit_and_whole_numbers(gateway: Gateway, name: str) -> None:
    assert name not in await sent(gateway, CHAT, BARE[CHAT] | {name: -1})
    assert (await sent(gateway, CHAT, BARE[CHAT] | {name: 5.0}))[name] == 5
    assert f"`{name}`" in await refused(gateway, CHAT, BARE[CHAT] | {name: 5.5})
    assert f"`{name}`" in await refused(gateway, CHAT, BARE[CHAT] | {name: 0})


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("number", [1e30, -1e30, 2.0**64])
async def test_a_number_beyond_every_integer_is_no_error_of_ours(gateway: Gateway, path: str, number: float) -> None:
    asked = BARE[CHAT] if path == CHAT else {"prompt": "hi"}
    status, answer = await post(gateway, path, asked | {"seed": number})
    assert status < 500, answer


async def test_options_of_a_stream_without_a_stream_say_nothing(gateway: Gateway) -> None:
    found = await sent(gateway, CHAT, BARE[CHAT] | {"stream_options": {"include_usage": True}})
    assert not found.get("stream")
    assert "stream_options" not in found


@pytest.mark.parametrize(
    ("content", "meant"),
    [
        (None, ""),
        ([None, "plain"], "plain"),
        ([{"text": "untyped"}], "untyped"),
        ([{"type": "text", "text": None}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "text"}], ""),
        ("lone \ud800 half", "lone \ufffd half"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_content_is_taken_as_the_text_that_it_holds(
    gateway: Gateway, path: str, content: Any, meant: str
) -> None:
    said = [{"role": "user", "content": content}]
    asked = {"messages": said, "max_tokens": 6} if path == MESSAGES else {"input": said}
    found = (await sent(gateway, path, asked))["messages"][0]["content"]
    text = found if isinstance(found, str) else "".join(part["text"] for part in found)
    assert text == meant


@pytest.mark.parametrize("result", [{"a": 1}, 5])
async def test_a_result_that_is_no_text_is_taken_as_its_json(gateway: Gateway, result: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    for path, asked in (
        (
            CHAT,
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": result},
                ]
            },
        ),
        (
            MESSAGES,
            {
                "max_tokens": 6,
                "messages": [
                    *USER,
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
                ],
            },
        ),
        (
            RESPONSES,
            {
                "input": [
                    *USER,
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": {"a": 1}},
                    {"type": "function_call_output", "call_id": "c1", "output": result},
                ]
            },
        ),
    ):
        *_, called, told = (await sent(gateway, path, asked))["messages"]
        assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        assert json.loads(told["content"]) == result
