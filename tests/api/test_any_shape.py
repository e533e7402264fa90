"""Requests of any shape, in every wire format: never a 500, and every error in its form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.chat.fields import take_as_meant
from api.chat.schemas import parse_chat_request
from api.wire.messages import MessagesReply
from api.wire.messages import translate_messages as from_messages
from api.wire.reply import TokenCounts
from api.wire.responses import check
from api.wire.responses import translate_responses as from_responses
from clawloop.core.errors import EngineAnswerUnusable, RequestRejected
from clawloop.core.families.orders import Rule, as_sent
from tests.api.conftest import Gateway
from tests.api.gateway_thread import gateway_thread
from tests.api.test_published import BLOCKS as BLOCKS_DECIDED
from tests.api.test_published import ITEMS as ITEMS_DECIDED

# Requests of any shape in other wire formats: translated to a chat request, or refused with a field.

SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BLOCK_TYPES = (*BLOCKS_DECIDED, "hologram")
ITEM_TYPES = (*ITEMS_DECIDED, "hologram", "hologram_output", "hologram_call")
TOOL_TYPES = ("function", "namespace", "custom", "tool_search", "web_search", "tool_search_tool_regex_20251119")
PART_TYPES = ("input_text", "output_text", "refusal", "input_image", "input_file", "input_audio", "reasoning_text")
FILE = {"file_data": SCALARS | st.just("data:text/plain;base64,/w=="), "filename": SCALARS, "file_id": SCALARS}
ROLES = ("user", "assistant", "system", "developer", "tool")


def one_of(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(names) | SCALARS


IDS: st.SearchStrategy[Any] = st.sampled_from(("c1", "c2")) | SCALARS
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": one_of(BLOCK_TYPES)},
        optional={
            "text": SCALARS,
            "thinking": SCALARS,
            "source": VALUES | st.fixed_dictionaries({"type": st.sampled_from(("base64", "url", "file"))}),
            "id": IDS,
            "tool_use_id": IDS,
            "name": SCALARS,
            "input": VALUES,
            "content": VALUES,
            "tool": VALUES | st.fixed_dictionaries({"name": SCALARS}, optional={"server_name": SCALARS}),
            "tool_name": SCALARS,
            "title": SCALARS,
        },
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": one_of(ROLES)}, optional={"content": BLOCKS | VALUES}), min_size=1, max_size=4
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": one_of(PART_TYPES)}, optional={"text": SCALARS, "image_url": SCALARS} | FILE),
    max_size=3,
)
TOOL = st.fixed_dictionaries(
    {"type": one_of(TOOL_TYPES), "name": st.sampled_from(("f", "g"))},
    optional={"parameters": VALUES, "description": SCALARS, "defer_loading": st.booleans(), "format": VALUES}
    | {"execution": st.sampled_from(("client", "server")), "input_schema": VALUES},
)
TOOLS = st.lists(TOOL | st.fixed_dictionaries({"type": st.just("namespace"), "name": SCALARS, "tools": st.lists(TOOL)}))
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": one_of(ITEM_TYPES),
            "role": one_of(ROLES),
            "content": PARTS | VALUES,
            "summary": PARTS | VALUES,
            "call_id": IDS,
            "name": SCALARS,
            "arguments": VALUES,
            "output": PARTS | VALUES,
            "namespace": SCALARS,
            "input": SCALARS,
            "action": VALUES,
            "queries": VALUES,
            "results": VALUES,
            "code": SCALARS,
            "id": IDS,
            "tools": TOOLS | VALUES,
        },
    ),
    max_size=4,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"id": IDS}, optional={"function": st.fixed_dictionaries({"name": SCALARS, "arguments": VALUES})}
    )
    | VALUES,
    max_size=2,
)
OPTIONS = {
    "tools": TOOLS | st.lists(st.fixed_dictionaries({}, optional={"type": SCALARS, "name": SCALARS})),
    "tool_choice": VALUES | st.fixed_dictionaries({"type": one_of(("function", "tool", "custom")), "name": SCALARS}),
    "metadata": VALUES,
    "stream": st.booleans(),
}


def _of_messages(body: dict[str, Any]) -> dict[str, Any]:
    return from_messages(body, ()).body


def _of_responses(body: dict[str, Any]) -> dict[str, Any]:
    check(body)
    return from_responses(body, (), []).body


def _check(translate: Callable[[dict[str, Any]], dict[str, Any]], body: dict[str, Any]) -> None:
    refused: RequestRejected | None = None
    try:
        chat = translate(body)
    except RequestRejected as error:
        refused = error
    else:
        take_as_meant(chat)
        parse_chat_request(chat)
        orjson.dumps(chat)
        # What a chat was made of is sent in an order that any template takes.
        rules = frozenset(Rule)
        sent = as_sent(chat["messages"], rules)
        orjson.dumps(list(sent))
        assert all(message["role"] in ("user", "assistant") for message in sent)
        assert list(as_sent(sent, rules)) == list(sent)
    assert refused is None or (refused.status == 400 and refused.field)


@given(
    messages=MESSAGES,
    options=st.fixed_dictionaries(
        {}, optional=OPTIONS | {"thinking": VALUES, "output_config": VALUES, "system": VALUES}
    ),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_messages_of_any_shape(messages: Any, options: dict[str, Any]) -> None:
    _check(_of_messages, {"model": "policy", "max_tokens": 5, "messages": messages} | options)


@given(items=ITEMS, options=st.fixed_dictionaries({}, optional=OPTIONS | {"text": VALUES, "reasoning": VALUES}))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_responses_of_any_shape(items: Any, options: dict[str, Any]) -> None:
    _check(_of_responses, {"model": "policy", "input": items} | options)


@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": one_of(ROLES)}, optional={"content": VALUES, "tool_calls": CALLS | VALUES})
        | SCALARS,
        max_size=4,
    )
    | VALUES,
    options=st.fixed_dictionaries({}, optional={"tools": st.just([]) | VALUES, "tool_choice": VALUES}),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_careless_chats_of_any_shape(messages: Any, options: dict[str, Any]) -> None:
    body = {"model": "policy", "messages": messages} | options
    refused: RequestRejected | None = None
    try:
        take_as_meant(body)
        parse_chat_request(body)
    except RequestRejected as error:
        refused = error
    else:
        orjson.dumps(list(as_sent(body["messages"], frozenset(Rule))))
    assert refused is None or (refused.status == 400 and refused.field)


@pytest.mark.parametrize("arguments", ["true", "[1]", '{"command": "l', '"x"'])
def test_arguments_that_are_no_object_come_back_as_they_were(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    (block,) = MessagesReply("msg_1", "policy").whole(body, TokenCounts(1, 1))["content"]
    assert isinstance(block["input"], dict)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]
    chat = _of_messages({"model": "policy", "max_tokens": 5, "messages": messages})
    assert chat["messages"][1]["tool_calls"] == [call]


def test_a_reply_that_the_engine_gave_up_is_an_error() -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]}
    with pytest.raises(EngineAnswerUnusable, match="abort"):
        MessagesReply("msg_1", "policy").whole(body, TokenCounts(1, 1))


# Requests of any JSON, in every wire format: never a 500, and every error in its form.

# Generated requests of each kind; `make test-long` has more.
EXAMPLES = [20, pytest.param(80, marks=pytest.mark.long)]
VERSION = {"anthropic-version": "2023-06-01"}
HELLO = [{"role": "user", "content": "hello"}]
NUMBERS: st.SearchStrategy[Any] = st.sampled_from((0, 1, -1, 0.5, 2**31, 2**63, 10**30, 1e308)) | VALUES
FUNCTIONS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "name": VALUES}, optional={"function": VALUES}), max_size=2
)
CHOICES = VALUES | st.fixed_dictionaries(
    {"type": st.sampled_from(("function", "tool", "allowed_tools", "any", "auto"))},
    optional={"name": VALUES, "mode": st.sampled_from(("auto", "required")), "tools": FUNCTIONS | VALUES},
)
# Of replies that nobody gave, with the form of those that somebody did.
UNKNOWN_IDS = st.integers(0, 2**128 - 1).map(lambda number: f"chatcmpl-{number & ~(0xF << 76) | (7 << 76):032x}")
DEEP = "[" * 300 + "]" * 300
NAMES: st.SearchStrategy[Any] = st.sampled_from((f'{{"session_id": "s", "x": {DEEP}}}', DEEP, "\0", "é" * 70)) | VALUES
SHARED: dict[str, st.SearchStrategy[Any]] = OPTIONS | {
    "tool_choice": CHOICES,
    "tools": OPTIONS["tools"] | FUNCTIONS | VALUES,
    "metadata": VALUES | st.fixed_dictionaries({}, optional={"user_id": NAMES, "session_id": NAMES}),
    "chat_template_kwargs": VALUES,
    "session_id": NAMES,
    "session_done": VALUES,
    "turn_type": VALUES,
    "user": NAMES,
    "temperature": NUMBERS,
    "top_k": NUMBERS,
    "seed": NUMBERS,
    "n": NUMBERS,
    "max_tokens": NUMBERS,
    "stop": VALUES,
    "logprobs": NUMBERS,
    "response_format": VALUES,
    "structured_outputs": VALUES,
    "stream_options": VALUES,
}


def bodies(required: dict[str, Any], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    strategies = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in ({"model": "policy"} | required).items()
    }
    others = {name: value for name, value in (SHARED | optional).items() if name not in strategies}
    return st.fixed_dictionaries(strategies, optional=others)


CHATS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "system", "developer", "tool", "function"))},
        optional={"content": BLOCKS | VALUES, "tool_calls": VALUES, "tool_call_id": VALUES, "name": VALUES},
    ),
    min_size=1,
    max_size=4,
)
ANTHROPIC = bodies(
    {"max_tokens": 5, "messages": MESSAGES},
    system=VALUES | BLOCKS,
    thinking=VALUES,
    output_config=VALUES,
    stop_sequences=VALUES,
)
RESPONSES = bodies(
    {"input": ITEMS | st.just("hello")},
    instructions=st.just("Be brief.") | VALUES,
    text=VALUES,
    reasoning=VALUES,
    include=VALUES,
    truncation=VALUES,
    max_output_tokens=NUMBERS,
)
REQUESTS = {
    "/v1/chat/completions": bodies({"messages": CHATS}, tool_choice=VALUES),
    "/v1/completions": bodies({"prompt": st.just("hello") | VALUES}, echo=VALUES, suffix=VALUES, best_of=VALUES),
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/v1/feedback": st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("session_id", "turn", "rating", "score", "text", "outcome"), VALUES)
        | {"response_id": VALUES | UNKNOWN_IDS},
    ),
}
# Each of these an engine answers; of those that are generated few are.
PROPER: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": HELLO},
    "/v1/completions": {"model": "policy", "prompt": "hello"},
    "/v1/messages": {"model": "policy", "messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "policy", "messages": HELLO},
    "/v1/responses": {"model": "policy", "input": "hello"},
    "/v1/responses/input_tokens": {"model": "policy", "input": "hello"},
}


@pytest.fixture(scope="module")
def gateway_in_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_thread(tmp_path_factory.mktemp("any-shape")) as (_, gateway):
        yield gateway


@pytest.fixture
def client(gateway_in_thread: Gateway) -> Iterator[httpx.Client]:
    key = {"Authorization": f"Bearer {gateway_in_thread.key}"}
    with httpx.Client(base_url=gateway_in_thread.url, headers=key, timeout=120) as client:
        yield client


def headers_of(path: str) -> dict[str, str]:
    """What the path's format asks for besides a key."""
    return VERSION if path.startswith("/v1/messages") else {}


def error_fields(path: str) -> set[str]:
    """What an error has in the path's format."""
    return {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}


def check_answer(answer: httpx.Response, path: str) -> None:
    # The fake engine takes whatever it gets, so nothing is its fault.
    assert answer.status_code in (200, 202) or 400 <= answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == error_fields(path)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", REQUESTS)
def test_no_json_makes_a_500(client: httpx.Client, path: str, examples: int) -> None:
    headers = headers_of(path)

    @given(body=REQUESTS[path] | VALUES)
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def check(body: Any) -> None:
        check_answer(client.post(path, json=body, headers=headers), path)

    check()


def test_no_stored_conversation_makes_a_500(client: httpx.Client) -> None:
    """A response that goes on from a chat of any messages, with any instructions."""
    path = "/v1/responses"

    @given(messages=CHATS, goes_on=RESPONSES)
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def check(messages: Any, goes_on: dict[str, Any]) -> None:
        first = client.post("/v1/chat/completions", json={"model": "policy", "messages": messages})
        check_answer(first, path)
        if first.status_code == 200:
            name = first.json()["id"]
            check_answer(client.post(path, json=goes_on | {"previous_response_id": name}), path)
            check_answer(client.get(f"{path}/{name}"), path)

    check()


@given(number=st.integers(0, 2**128 - 1))
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_id_makes_a_500(gateway_in_thread: Gateway, number: int) -> None:
    key = {"Authorization": f"Bearer {gateway_in_thread.key}"}
    with_version = number & ~(0xF << 76) | (7 << 76)  # an id of a time, which may be any
    for path in (f"/v1/responses/resp_{with_version:032x}", f"/v1/chat/completions/chatcmpl-{number:032x}"):
        answer = httpx.get(f"{gateway_in_thread.url}{path}", headers=key)
        assert answer.status_code == 404, answer.text
