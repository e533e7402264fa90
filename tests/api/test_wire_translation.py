"""Requests of any shape in other wire formats: translated to a chat request, or refused with a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.chat.schemas import parse_chat_request
from api.wire.messages_reply import MessagesReply
from api.wire.messages_request import translate as from_messages
from api.wire.reply import TokenCounts
from api.wire.responses_request import check
from api.wire.responses_request import translate as from_responses
from clawloop.errors import EngineAnswerUnusable, RequestRejected

SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BLOCK_TYPES = ("text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result", "search_result")
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference", "web_search_call")
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
            "arguments": SCALARS,
            "output": PARTS | VALUES,
        },
    ),
    max_size=4,
)
OPTIONS = {
    "tools": st.lists(st.fixed_dictionaries({}, optional={"type": SCALARS, "name": SCALARS, "input_schema": VALUES})),
    "tool_choice": VALUES,
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
        parse_chat_request(chat)
        orjson.dumps(chat)
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
