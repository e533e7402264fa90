"""What today's Codex, Claude Code and OpenAI clients send, over a model whose template takes few orders of roles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.families.orders import SENT_BY, as_sent
from tests.api.chat_requests import PATH as CHAT
from tests.api.chat_requests import chat_body
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import FakeEngine
from tests.fakes.replies import Reply

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
VERSION = {"anthropic-version": "2023-06-01"}
TEMPLATES = Path(__file__).parents[1] / "unit" / "families" / "templates"
NOW = {"type": "function", "name": "now", "description": "time", "parameters": {"type": "object", "properties": {}}}
CLOCK = {"type": "namespace", "name": "mcp__clock", "description": "clock", "tools": [NOW]}


@pytest.fixture
async def strict(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose engine's template takes one system message, at the beginning; its context is 32,768."""
    engine.template, engine.context = (TEMPLATES / "strict.jinja").read_text(), 32768
    async with running_gateway(tmp_path, engines=[engine]) as running:
        yield running
    engine.template = engine.context = None


def message(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


async def post(gateway: Gateway, path: str, body: dict[str, Any]) -> Any:
    async with gateway.client() as client:
        return await client.post(path, json={"model": "policy"} | body, headers=VERSION if path == MESSAGES else {})


def ended(stream: str) -> Any:
    """The response in a stream's last event."""
    (*_, last) = (line for line in stream.splitlines() if line.startswith("data: "))
    return orjson.loads(last.removeprefix("data: "))["response"]


async def last_turn(gateway: Gateway, count: int = 1) -> TurnRecord:
    return (await gateway.recorded(count))[-1]


ORDERS: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {"messages": [message("system", "S"), message("user", "hi"), message("developer", "D"), message("user", "ho")]},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n<system>\nD\n</system>"
        "<|im_end|>\n<|im_start|>user\nho<|im_end|>\n",
    ),
    (
        MESSAGES,
        {"max_tokens": 6, "system": "S", "messages": [message("user", "time?"), message("system", "# Env\nlinux")]},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\ntime?<|im_end|>\n<|im_start|>user\n<system>\n# Env\nlinux"
        "\n</system><|im_end|>\n",
    ),
    (
        RESPONSES,
        {"instructions": "I", "input": [message("developer", "D"), message("user", "hi"), message("developer", "E")]},
        "<|im_start|>system\nI\n\nD<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n<system>\nE\n</system>"
        "<|im_end|>\n",
    ),
]


@pytest.mark.parametrize(("path", "given", "prompt"), ORDERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_order_that_the_template_refuses_is_changed_in_place(
    strict: Gateway, path: str, given: dict[str, Any], prompt: str, stream: bool
) -> None:
    answer = await post(strict, path, given | {"stream": stream})
    assert answer.status_code == 200
    assert answer.headers["x-clawloop-changed"] == "roles"
    assert strict.engine.prompts[-1].startswith(prompt)
    turn = await last_turn(strict)
    # Recorded and matched as received; the rules say what the engine saw.
    roles = [each["role"] for each in turn.messages]
    assert roles.count("user") < sum(each["role"] == "user" for each in strict.engine.requests[-1]["messages"])
    rules: Any = turn.sampling[SENT_BY]
    assert as_sent(turn.messages, rules) == strict.engine.requests[-1]["messages"]
    assert SENT_BY not in strict.engine.requests[-1]


async def test_a_conversation_goes_on_and_its_prompt_begins_as_before(strict: Gateway) -> None:
    first = [message("user", "one"), message("system", "late")]
    second = [*first, message("assistant", "Hello there, friend."), message("user", "two"), message("system", "later")]
    sessions = set()
    for messages in (first, second):
        answer = await post(strict, MESSAGES, {"max_tokens": 6, "messages": messages})
        assert answer.status_code == 200
        sessions.add(answer.headers["x-clawloop-session"])
    before, after = strict.engine.prompts
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n<think>\n"))
    assert len(sessions) == 1


async def test_what_the_template_takes_is_sent_as_it_came(strict: Gateway) -> None:
    answer = await post(strict, CHAT, {"messages": [message("system", "S"), message("user", "hi")]})
    assert "x-clawloop-changed" not in answer.headers
    assert SENT_BY not in (await last_turn(strict)).sampling


async def test_the_template_is_asked_once_an_engine(strict: Gateway) -> None:
    await post(strict, CHAT, chat_body())
    asked = strict.engine.probes
    assert 10 < asked < 60
    for _ in range(3):
        await post(strict, CHAT, chat_body())
    assert strict.engine.probes == asked
    assert len(strict.engine.requests) == 4  # no request more for any chat


async def test_a_prompt_is_counted_as_it_is_sent(strict: Gateway) -> None:
    given = {"messages": [message("user", "x"), message("system", "y z")]}
    async with strict.client() as client:
        counted = await client.post("/v1/messages/count_tokens", json={"model": "policy"} | given, headers=VERSION)
    assert counted.status_code == 200
    assert [each["role"] for each in strict.engine.requests[-1]["messages"]] == ["user", "user"]


async def test_tools_that_the_template_does_not_know_are_left_out_and_named(engine: FakeEngine, tmp_path: Path) -> None:
    engine.template = (TEMPLATES / "smollm2.jinja").read_text()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    try:
        async with running_gateway(tmp_path, engines=[engine]) as gateway:
            given = chat_body(tools=[tool], tool_choice="auto", parallel_tool_calls=True, store=True)
            answer = await post(gateway, CHAT, given)
            assert answer.headers["x-clawloop-ignored"] == "store, tools, tool_choice, parallel_tool_calls"
            assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(engine.requests[-1])
            answer = await post(gateway, CHAT, chat_body(tools=[tool], tool_choice=None))
            assert answer.headers["x-clawloop-ignored"] == "tools"
            assert (await last_turn(gateway)).tools is None
    finally:
        engine.template = None


async def test_an_engine_without_a_parser_of_calls_is_told_in_our_words(gateway: Gateway) -> None:
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    gateway.engine.script = lambda body: Reply(refused=said)
    answer = await post(gateway, CHAT, chat_body(tools=[{"type": "function", "function": {"name": "f"}}]))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "--enable-auto-tool-choice" not in error["message"]


# Fields that hide what is recorded


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_for_the_client_alone(gateway: Gateway, stream: bool) -> None:
    answer = await post(gateway, CHAT, chat_body("THINK", include_reasoning=False, stream=stream))
    assert answer.status_code == 200
    assert "x-clawloop-ignored" not in answer.headers
    assert "Let me see" not in answer.text
    assert "Yes." in answer.text or not stream
    assert "include_reasoning" not in gateway.engine.requests[0]
    turn = await last_turn(gateway)
    assert turn.response_ids == [30, 31, 2]
    assert turn.logprobs is not None
    assert len(turn.logprobs) == 3
    assert turn.response is not None
    assert turn.response["reasoning_content"] == "Let me see."
    assert turn.error is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_without_token_ids_is_an_error_and_counted(gateway: Gateway, stream: bool) -> None:
    gateway.engine.script = lambda body: Reply("", has_ids=False)
    before = gateway.services.metrics.turns_without_tokens._value.get()
    assert (await post(gateway, CHAT, chat_body(stream=stream))).status_code == 200
    turn = await last_turn(gateway)
    assert turn.error
    assert turn.response_ids is None
    assert gateway.services.metrics.turns_without_tokens._value.get() == before + 1


# Too strict


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, chat_body(max_tokens=64000)),
        (CHAT, chat_body(max_completion_tokens=64000, stream=True)),
        (MESSAGES, {"max_tokens": 64000, "messages": [message("user", "hi")]}),
        (RESPONSES, {"max_output_tokens": 64000, "input": "hi"}),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_limit_beyond_the_context_is_cut_to_what_fits(
    engine: FakeEngine, tmp_path: Path, path: str, given: dict[str, Any], is_known: bool
) -> None:
    engine.context = 32768 if is_known else None
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        assert (await post(gateway, CHAT, chat_body())).status_code == 200  # by now it has been asked
        engine.context = 32768
        answer = await post(gateway, path, given)
        assert answer.status_code == 200
        assert answer.headers["x-clawloop-changed"] == "max_tokens=32765"  # the prompt has three
        turn = await last_turn(gateway, 2)
        assert 32768 in (turn.sampling.get("max_tokens"), turn.sampling.get("max_completion_tokens"))
        assert len(engine.requests) == (2 if is_known else 3)
    engine.context = None


async def test_a_limit_that_the_prompt_leaves_too_little_for_is_told(strict: Gateway) -> None:
    answer = await post(strict, CHAT, chat_body(max_tokens=32767))
    assert answer.headers["x-clawloop-changed"] == "max_tokens=32765"
    assert strict.engine.requests[-1]["max_tokens"] == 32767  # the engine cuts it
    assert "x-clawloop-changed" not in (await post(strict, CHAT, chat_body(max_tokens=32765))).headers


async def test_what_an_engine_of_another_version_leaves_for_the_reply_is_told(gateway: Gateway) -> None:
    said = (
        "This model's maximum context length is 4096 tokens. However, you requested 64003 tokens (3 in the messages, "
        "64000 in the completion). Please reduce the length of the messages or completion."
    )
    gateway.engine.script = lambda body: Reply(refused=said) if body["max_tokens"] > 4093 else Reply()
    answer = await post(gateway, CHAT, chat_body(max_tokens=64000))
    assert answer.status_code == 200
    assert answer.headers["x-clawloop-changed"] == "max_tokens=4093"
    assert gateway.engine.requests[-1]["max_tokens"] == 4093


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input "
            "tokens, which exceeds this limit even without any output tokens.",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains 90000 characters (more "
            "than 45056 characters, which is the upper bound for 4096 input tokens).",
            "prompt is too long: 8182 tokens > 4096 maximum",
        ),
        (
            "Input length (5000) exceeds model's maximum context length (4096).",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_as_each_client_reads_it(
    gateway: Gateway, said: str, words: str
) -> None:
    gateway.engine.script = lambda body: Reply(refused=said)
    answer = await post(gateway, MESSAGES, {"max_tokens": 5, "stream": True, "messages": [message("user", "x")]})
    assert answer.status_code == 400
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": words}
    for path, given in ((CHAT, chat_body()), (RESPONSES, {"input": "x"})):
        answer = await post(gateway, path, given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    # Codex compacts on this event of a stream, and gives up on a 400.
    answer = await post(gateway, RESPONSES, {"input": "x", "stream": True})
    assert ended(answer.text)["error"]["code"] == "context_length_exceeded"
    assert gateway.turns.records == []


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": None}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "auto"},
        {"tool_choice": None},
    ],
)
async def test_no_tools_are_no_tools(gateway: Gateway, fields: dict[str, Any]) -> None:
    answer = await post(gateway, CHAT, chat_body(**fields))
    assert answer.status_code == 200
    assert not {"tools", "tool_choice"} & set(gateway.engine.requests[0])


async def test_a_call_that_is_wanted_needs_tools(gateway: Gateway) -> None:
    answer = await post(gateway, CHAT, chat_body(tools=[], tool_choice="required"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


async def test_nothing_said_and_no_arguments_are_empty_ones(gateway: Gateway) -> None:
    messages = [
        message("user", "x"),
        message("assistant", None) | {"tool_calls": [CALL]},
        message("tool", None) | {"tool_call_id": "c1"},
    ]
    assert (await post(gateway, CHAT, {"messages": messages})).status_code == 200
    _, called, result = gateway.engine.requests[0]["messages"]
    assert called["tool_calls"][0]["function"]["arguments"] == "{}"
    assert result["content"] == ""


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (rb"cut \ud83d", "cut �"),
        (rb"whole \ud83d\ude00", "whole 😀"),
        (rb"backslash \\ud83d", r"backslash \ud83d"),
        (rb"\ude00\ud83d\ud83d\ude00", "��😀"),
        (b"\xed\xa0\x80", "�"),
    ],
)
async def test_half_a_character_is_one_that_cannot_be_read(gateway: Gateway, raw: bytes, said: str) -> None:
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "' + raw + b'"}]}'
    async with gateway.client() as client:
        answer = await client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert gateway.engine.requests[0]["messages"][0]["content"] == said


async def test_what_named_the_session_was_not_ignored(gateway: Gateway) -> None:
    named: dict[str, Any] = {"prompt_cache_key": "k", "metadata": {"session_id": "s"}, "safety_identifier": "i"}
    answer = await post(gateway, CHAT, chat_body(**named, service_tier=None))
    assert "x-clawloop-ignored" not in answer.headers
    answer = await post(gateway, CHAT, chat_body(metadata={"session_id": "s", "team": "t"}, store=True))
    assert answer.headers["x-clawloop-ignored"] == "metadata.team, store"
    named = {"metadata": {"session_id": "s"}, "prompt_cache_key": "k", "client_metadata": {"thread_id": "t"}}
    answer = await post(gateway, RESPONSES, {"input": "x"} | named)
    assert "x-clawloop-ignored" not in answer.headers


# Newer items


@pytest.mark.parametrize("stream", [False, True])
async def test_a_namespaces_tools_are_functions_and_come_back(gateway: Gateway, stream: bool) -> None:
    gateway.engine.script = lambda body: Reply(calls=[("mcp__clock__now", {})])
    given = {"input": "what time is it", "tools": [CLOCK], "tool_choice": "required", "stream": stream}
    answer = await post(gateway, RESPONSES, given)
    assert answer.status_code == 200
    (function,) = gateway.engine.requests[0]["tools"]
    assert function["function"]["name"] == "mcp__clock__now"
    response = ended(answer.text) if stream else answer.json()
    (item,) = [each for each in response["output"] if each["type"] == "function_call"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("mcp__clock", "now", "{}")
    assert response["tools"] == [CLOCK]
    again = [message("user", "what time is it"), item, {"type": "function_call_output", "call_id": item["call_id"]}]
    again[-1]["output"] = "noon"
    assert (await post(gateway, RESPONSES, {"input": again, "tools": [CLOCK]})).status_code == 200
    call = gateway.engine.requests[1]["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "mcp__clock__now", "arguments": "{}"}


async def test_a_recorded_response_has_the_tools_that_its_client_knows(gateway: Gateway) -> None:
    patch = {"type": "custom", "name": "apply_patch", "description": "patches"}
    search = {"type": "tool_search", "execution": "client", "description": "finds"}
    plain = {"type": "function", "name": "plain", "description": "p", "parameters": {"type": "object"}}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("mcp__clock__now", {}),
        ("apply_patch", {"input": "***"}),
        ("plain", {}),
    ]
    gateway.engine.script = lambda body: Reply(calls=calls)
    given = {"input": "x", "tools": [CLOCK, patch, plain, search], "instructions": "Be brief."}
    answered = (await post(gateway, RESPONSES, given)).json()
    async with gateway.client() as client:
        stored = (await client.get(f"{RESPONSES}/{answered['id']}")).json()
        bare = (await post(gateway, RESPONSES, {"input": "x", "tools": [plain]})).json()
        stored_bare = (await client.get(f"{RESPONSES}/{bare['id']}")).json()
    assert [item["type"] for item in stored["output"]] == ["function_call", "custom_tool_call", "function_call"]
    for mine, theirs in zip(stored["output"], answered["output"], strict=True):
        assert (mine["name"], mine.get("namespace")) == (theirs["name"], theirs.get("namespace"))
    assert stored["output"][0]["namespace"] == "mcp__clock"
    space, custom, function, finds = stored["tools"]
    assert (space["type"], space["name"], [tool["name"] for tool in space["tools"]]) == (
        *("namespace", "mcp__clock"),
        ["now"],
    )
    assert (custom["type"], custom["name"], function["name"], finds["type"]) == (
        *("custom", "apply_patch"),
        *("plain", "tool_search"),
    )
    assert [item["name"] for item in stored_bare["output"]][-1] == "plain"
    recorded, without = await gateway.recorded(2)
    assert "tool_origins" not in gateway.engine.requests[0]
    assert recorded.sampling["tool_origins"] == {
        "mcp__clock__now": ["function", "now", "mcp__clock"],
        "apply_patch": ["custom", "apply_patch", None],
        "tool_search": ["search", "tool_search", None],
    }
    assert "tool_origins" not in without.sampling


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_and_searches_come_back_as_such(gateway: Gateway, stream: bool) -> None:
    patch = {"type": "custom", "name": "apply_patch", "description": "patches"}
    search = {"type": "tool_search", "execution": "client", "description": "finds"}
    calls = [("apply_patch", {"input": "*** Begin"}), ("tool_search", {"query": "x"})]
    gateway.engine.script = lambda body: Reply(calls=calls)
    answer = await post(gateway, RESPONSES, {"input": "x", "tools": [patch, search], "stream": stream})
    assert "x-clawloop-ignored" not in answer.headers
    response = ended(answer.text) if stream else answer.json()
    custom, found = response["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert (found["type"], found["execution"], found["arguments"]) == ("tool_search_call", "client", {"query": "x"})
    assert stream == ("response.custom_tool_call_input.done" in answer.text)


async def test_a_deferred_tool_is_shown_once_it_is_loaded(gateway: Gateway) -> None:
    deferred = NOW | {"defer_loading": True}
    search = {"type": "tool_search", "execution": "client"}
    opening = [message("user", "x"), {"type": "tool_search_call", "call_id": "c1", "execution": "client"}]
    opening[-1]["arguments"] = {"query": "time"}
    found = {"type": "tool_search_output", "call_id": "c1", "tools": [CLOCK]}
    for items, names in (([opening[0]], ["tool_search"]), ([*opening, found], ["tool_search", "mcp__clock__now"])):
        given = {"input": items, "tools": [search, deferred]}
        assert (await post(gateway, RESPONSES, given)).status_code == 200
        shown = gateway.engine.requests[-1]["tools"]
        assert [tool["function"]["name"] for tool in shown] == names
    assert gateway.engine.requests[-1]["messages"][-1]["content"] == "Tools loaded: mcp__clock__now"


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}} | fields


LOADS: list[tuple[list[Any], list[str]]] = [
    ([message("user", "time?")], ["ToolSearch"]),
    (
        [
            message("user", "time?"),
            message("assistant", [{"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "x"}}]),
            message(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "tool_reference", "tool_name": "mcp__clock__now"}],
                    }
                ],
            ),
        ],
        ["ToolSearch", "mcp__clock__now"],
    ),
    (
        [
            message("user", "hi"),
            message(
                "system",
                [
                    {"type": "text", "text": "tools"},
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "mcp__clock__now"}},
                ],
            ),
        ],
        ["ToolSearch", "mcp__clock__now"],
    ),
]


@pytest.mark.parametrize(("messages", "names"), LOADS)
async def test_a_deferred_tool_of_messages_is_shown_once_it_is_loaded(
    gateway: Gateway, messages: list[Any], names: list[str]
) -> None:
    tools = [tool("mcp__clock__now", defer_loading=True), tool("ToolSearch")]
    answer = await post(gateway, MESSAGES, {"max_tokens": 6, "tools": tools, "messages": messages})
    assert answer.status_code == 200
    assert [each["function"]["name"] for each in gateway.engine.requests[0]["tools"]] == names
