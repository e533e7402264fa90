"""Two spellings of one message compare as equal, two messages never do."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.canonical import (
    EMPTY_RESPONSE,
    canonical,
    extend_digest,
    is_aside,
    is_volatile,
    prefix_digests,
    response_digest,
    seed_digest,
)
from clawloop.core.turns.encoding import encode
from clawloop.core.turns.thinking import without_leading_thinking
from tests.chats import KEY, OTHER_KEY, SEED, VOLATILE, assistant, json_values, odd_messages, plain_messages, user

IMAGE: JsonValue = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
OTHER_IMAGE: JsonValue = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BB"}}


def said(content: JsonValue, **fields: JsonValue) -> Message:
    return {"role": "assistant", "content": content, **fields}


def asked(content: JsonValue, **fields: JsonValue) -> Message:
    return {"role": "user", "content": content, **fields}


def called(arguments: JsonValue, call_id: JsonValue = "call1", name: str = "exec", **fields: JsonValue) -> Message:
    return said(None, tool_calls=[{"id": call_id, "function": {"name": name, "arguments": arguments}, **fields}])


def text(value: str, **fields: JsonValue) -> JsonValue:
    return {"type": "text", "text": value, **fields}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (asked("x"), asked([text("x", cache_control={"type": "ephemeral"})])),
        (asked("xy"), asked([text("x"), text("y")])),
        (asked("x"), asked("x", timestamp=3)),
        (asked(None), asked("")),
        (asked([]), {"role": "user"}),
        (said(None), said("")),
        (said("x"), said("\n\nx ")),
        (said("x"), said("x", name="agent", refusal=None, annotations=[])),
        (said("x"), said("<think>a\nb</think>\n\nx")),
        (said("x"), said("a\nb</think>\n\nx")),
        (said("x y"), said("x <think>hm</think>y")),
        (said(""), said("<think>cut off")),
        (said("x"), said([{"type": "thinking", "thinking": "hm"}, text("x")])),
        (said("x"), said([text("<think>hm"), text("</think>x")])),
        (said("x"), said("x", reasoning_content="hm", reasoning="hm")),
        (said("x"), said("x", tool_calls=[])),
        (said("x"), said("x", tool_calls=None)),
        (called('{"a": 1, "b": [2]}'), called('{"b":[2],"a":1}')),
        (called('{"a": 1.0, "b": 1e2}'), called('{"a":1,"b":100}')),
        (called('{"a": "é"}'), called('{"a": "\\u00e9"}')),
        (called('{"a": 12345678901234567890}'), called('{"a": 12345678901234567000}')),
        (called('{"a": 1}'), called({"a": 1})),
        (called(""), called("{}")),
        (called(None), called("{}")),
        (called("not json "), called("not json")),
        (called("{}", "call_fake-2"), called("{}", "callfake2")),
        (called("{}", "a" * 44), called("{}", "a" * 40)),
        (called("{}", None), called("{}", "")),
        (called("{}", type="function", index=0), called("{}")),
        (
            {"role": "tool", "content": "x", "tool_call_id": "call_1"},
            {"role": "tool", "content": [text("x")], "tool_call_id": "call1", "name": "exec"},
        ),
    ],
)
def test_different_spellings_of_one_message_are_equal(one: Message, other: Message) -> None:
    assert encode(canonical(one)) == encode(canonical(other))
    assert extend_digest(SEED, one) == extend_digest(SEED, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asked("x"), asked("x ")),
        (asked("x"), said("x")),
        (asked("x"), {"role": "system", "content": "x"}),
        (asked("x", name="ann"), asked("x", name="bob")),
        (asked("<think>x</think>y"), asked("y")),
        (asked([text("x"), IMAGE]), asked("x")),
        (asked([text("x"), IMAGE]), asked([text("x"), OTHER_IMAGE])),
        (asked([text("x"), IMAGE]), asked([IMAGE, text("x")])),
        (asked([text("x"), IMAGE, text("y")]), asked([text("xy"), IMAGE])),
        (asked([{"type": "thinking", "thinking": "hm"}]), asked("")),
        (asked(0), asked(False)),
        (asked(0), asked("")),
        (asked(["x", 1]), asked('["x",1]')),
        (said("x"), said("x<think>hm</think>y")),
        (called("{}"), said("")),
        (called('{"a": 1}'), called('{"a": "1"}')),
        (called('{"a": 1}'), called('{"a": true}')),
        (called('{"a": [1, 2]}'), called('{"a": [2, 1]}')),
        (called("{'a': 1}"), called('{"a": 1}')),
        (called("{}"), called("{}", name="read")),
        (called("{}", "call1"), called("{}", "call2")),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, {"role": "tool", "content": "x", "tool_call_id": "2"}),
    ],
)
def test_two_different_messages_are_not_equal(one: Message, other: Message) -> None:
    assert encode(canonical(one)) != encode(canonical(other))
    assert extend_digest(SEED, one) != extend_digest(SEED, other)


@pytest.mark.parametrize(
    ("message", "volatile"),
    [
        (VOLATILE, True),
        (user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n"), True),
        (user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\ncut off"), True),
        (user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\nhello"), False),
        (user("What is <<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>?"), False),
        (assistant("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"), False),
        (user(""), False),
        ({}, False),
    ],
)
def test_only_messages_made_for_one_request_are_volatile(message: Message, volatile: bool) -> None:
    assert is_volatile(message) is volatile


@pytest.mark.parametrize("nothing", ["", None, [], "  ", "<think>only thinking</think>", "<think>cut off"])
def test_responses_without_text_and_tool_calls_are_one(nothing: JsonValue) -> None:
    assert response_digest(said(nothing)) == EMPTY_RESPONSE
    assert response_digest(said(nothing, tool_calls=[{"id": "1", "function": {"name": "f"}}])) != EMPTY_RESPONSE


def test_an_image_alone_is_a_response() -> None:
    assert response_digest(said([IMAGE])) != EMPTY_RESPONSE


def test_keys_and_narrowings_share_no_prefix() -> None:
    seeds = [
        seed_digest(KEY, ()),
        seed_digest(OTHER_KEY, ()),
        seed_digest(KEY, ("user=a",)),
        seed_digest(KEY, ("user=a", "user=b")),
        seed_digest(KEY, ("user=auser=b",)),
    ]
    assert len({prefix_digests(seed, [user("hi")])[0] for seed in seeds}) == len(seeds)
    assert {len(seed) for seed in seeds} == {16}


def test_digests_stay_what_they_are_because_they_are_stored() -> None:
    messages: list[Message] = [user("hé"), called('{"b": 1.5, "a": [null, true]}'), VOLATILE]
    assert [digest.hex() for digest in prefix_digests(SEED, messages)] == [
        "29f0f58a6617b68e683808e8c4337f68",
        "16692e8ed4422dae0f7bc8aae8a098bd",
        "16692e8ed4422dae0f7bc8aae8a098bd",
    ]


def test_thinking_tags_that_cannot_be_removed_cleanly_stay_and_cost_no_time() -> None:
    depth = 100_000  # 2 MB; taking out one pair at a time makes a new pair, so repeating would take hours
    nested = "<th" * depth + "<think></think>" + "ink>" * depth
    assert canonical(said(nested))["content"] == nested


def test_nesting_of_any_depth_has_a_digest() -> None:
    deep: JsonValue = []
    for _ in range(100_000):
        deep = [deep]
    assert extend_digest(SEED, asked(deep)) != extend_digest(SEED, asked([deep]))


def test_numbers_beyond_every_machine_type_have_a_digest() -> None:
    assert encode(10**5000) != encode(10**5000 + 1)
    assert encode(-0.0) == encode(0)


@given(odd_messages)
def test_no_json_shape_raises_and_the_form_is_idempotent(message: Message) -> None:
    once = canonical(message)
    assert encode(canonical(once)) == encode(once)
    response_digest(message)
    is_volatile(message)


@given(json_values, json_values)
def test_different_values_have_different_encodings(one: JsonValue, other: JsonValue) -> None:
    assert encode([one, other]) == b"l2:" + encode(one) + encode(other)
    if encode(one) == encode(other):
        assert encode([one, "x"]) == encode([other, "x"])
    else:
        assert not encode(one).startswith(encode(other))


@given(st.lists(odd_messages | plain_messages, max_size=5), st.data())
def test_digests_ignore_volatile_messages_and_thinking_wherever_they_stand(
    messages: list[Message], data: st.DataObject
) -> None:
    plain = prefix_digests(SEED, messages)
    place = data.draw(st.integers(0, len(messages)))
    assert prefix_digests(SEED, [*messages[:place], VOLATILE, *messages[place:]])[-1:] == (plain[-1:] or [SEED])
    thoughtful: list[Message] = [
        {**message, "content": f"<think>hm</think>\n{message['content']}", "reasoning_content": "hm"}
        if message.get("role") == "assistant"
        and isinstance(message.get("content"), str)
        and "think>" not in str(message["content"])
        else message
        for message in messages
    ]
    assert prefix_digests(SEED, thoughtful) == plain


@given(st.lists(plain_messages, min_size=1, max_size=6))
def test_a_prefix_has_the_digest_it_had_when_it_was_whole(messages: list[Message]) -> None:
    digests = prefix_digests(SEED, messages)
    assert len(digests) == len(messages)
    for place in range(len(messages)):
        assert prefix_digests(SEED, messages[: place + 1])[-1] == digests[place]
    assert extend_digest(digests[-1], user("more")) == prefix_digests(SEED, [*messages, user("more")])[-1]


REMINDER = "<system-reminder>\nThe date is Friday.\n</system-reminder>"
NOTE = "<task-notification><status>completed</status></task-notification>"
COMMAND = "<command-name>/compact</command-name>\n      <command-message>compact</command-message>\n"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Hello."}],
        [{"type": "text", "text": NOTE}, {"type": "text", "text": REMINDER}, {"type": "text", "text": "Hello."}],
        [REMINDER, "Hello."],
        [{"type": "text", "text": "Hello."}, {"type": "text", "text": REMINDER}],
        f"{REMINDER}\n{COMMAND}\n\nHello.",
        f"Hello.\n{REMINDER}\n{REMINDER}\n",
        f"{NOTE}Hello.{NOTE}",
    ],
)
def test_what_a_client_puts_beside_a_persons_words_is_no_part_of_the_message(content: JsonValue) -> None:
    message: Message = {"role": "user", "content": content}
    assert canonical(message) == {"role": "user", "content": "Hello."}
    assert not is_aside(message)


@pytest.mark.parametrize(
    "content",
    [
        f"{REMINDER}{REMINDER}",
        [{"type": "text", "text": NOTE}, {"type": "text", "text": REMINDER}],
        COMMAND,
    ],
)
def test_a_message_of_asides_alone_is_kept_and_is_the_clients(content: JsonValue) -> None:
    message: Message = {"role": "user", "content": content}
    assert canonical(message)["content"]
    assert is_aside(message)
    assert not is_aside(message | {"role": "assistant"})


@pytest.mark.parametrize(
    "text",
    [
        "<system-reminder>Hello.",
        "Hello.</system-reminder>",
        "What is a <system-reminder>x</system-reminder> for?",
        "<system-reminders>x</system-reminders>",
        f"{{{REMINDER}}}",
        "",
    ],
)
def test_what_only_looks_like_an_aside_stays(text: str) -> None:
    assert canonical({"role": "user", "content": text}) == {"role": "user", "content": text}
    assert not is_aside({"role": "user", "content": text})


def test_a_picture_beside_a_reminder_is_a_persons() -> None:
    picture: JsonValue = {"type": "image_url", "image_url": {"url": "x"}}
    message: Message = {"role": "user", "content": [{"type": "text", "text": REMINDER}, picture]}
    assert canonical(message)["content"] == [picture]
    assert not is_aside(message)
    assert canonical({"role": "assistant", "content": REMINDER})["content"] == REMINDER


def test_thousands_of_asides_take_no_time() -> None:
    many = "<system-reminder>x</system-reminder>" * 30_000
    began = time.process_time()
    for text in (f"{many}Hello.", f"Hello.{many}", many.replace("</system-reminder>", ""), many + "<system-reminder>"):
        canonical({"role": "user", "content": text})
    assert time.process_time() - began < 2


def test_thinking_is_what_a_text_begins_with() -> None:
    assert without_leading_thinking("<think>a</think>b") == "b"
    assert without_leading_thinking("  <think>a") == ""
    assert without_leading_thinking("a</think>b") == "b"
    assert without_leading_thinking("use <think> and </think> tags") == "use <think> and </think> tags"
