"""Requests of any shape in other wire formats: translated to a chat request, or refused with a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
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
from tests.api.test_published_schemas import BLOCKS as BLOCKS_DECIDED
from tests.api.test_published_schemas import ITEMS as ITEMS_DECIDED

SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BLOCK_TYPES = (*BLOCKS_DECIDED, "hologram")
ITEM_TYPES = (*ITEMS_DECIDED, "hologram", "hologram_output", "hologram_call")
TOOL_TYPES = ("function", "namespace", "custom", "tool_search", "web_search", "tool_search_tool_regex_20251119")
PART_TYPES = ("input_text", "output_text", "refusal", "input_image", "input_file", "reasoning_text")
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
            "source": VALUES,
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
    st.fixed_dictionaries({"type": one_of(PART_TYPES)}, optional={"text": SCALARS, "image_url": SCALARS}), max_size=3
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
