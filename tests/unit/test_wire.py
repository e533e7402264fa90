"""Wire formats: chunks of engines, server-sent events, schemas, counted tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from pydantic import JsonValue

from api.chat.bounds import check_bounds
from api.chat.capture import Capture
from api.chat.key_limits import Pace, TokenMeter
from clawloop.core.errors import RecordUnusable, RequestRejected
from clawloop.core.settings import ChatBounds
from clawloop.serving.events import event_data
from db.content import exact_json, ids_to_bytes, storable
from db.turns.read import Conversation, delta

# Server-sent events, split anywhere, are parsed as the openai SDK parses them.

LINES = st.sampled_from(["data: {}", "data:x", "data: a b", "data", ": comment", "event: e", "", "", "id: 4"])
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


async def _chunks(stream: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


async def _read(stream: bytes, size: int) -> list[bytes]:
    return [data async for arrived in event_data(_chunks(stream, size), limit_bytes=10_000) for data in arrived]


@given(lines=st.lists(st.tuples(LINES, ENDS), max_size=20), size=st.integers(1, 7))
async def test_any_stream_is_parsed_as_by_the_openai_sdk(lines: list[tuple[str, str]], size: int) -> None:
    # "\r" followed by the "\n" of an empty line would be one line end.
    stream = "".join(line + ("\n" if end == "\r" else end) for line, end in lines).encode()
    expected = [event.data.encode() for event in SSEDecoder().iter_bytes(iter([stream])) if event.data]
    assert [data for data in await _read(stream, size) if data] == expected


@given(size=st.integers(1, 30))
async def test_carriage_returns_are_line_ends_wherever_the_stream_is_split(size: int) -> None:
    assert await _read(b"data: a\r\rdata: b\rdata: c\r\r", size) == [b"a", b"b\nc"]
    assert await _read(b"data: a\r\n\r\ndata: b\n\n", size) == [b"a", b"b"]


async def test_events_that_arrive_together_are_read_together() -> None:
    chunks = _chunks(b"data: a\n\ndata: b\n\ndata: c\n\n", 20)
    assert [arrived async for arrived in event_data(chunks, limit_bytes=10_000)] == [[b"a", b"b"], [b"c"]]


async def test_an_event_that_no_blank_line_ends_is_dropped() -> None:
    assert await _read(b"data: a\n\ndata: b", 100) == [b"a"]
    assert await _read(b"data: a\n\ndata: b\n", 100) == [b"a"]


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_an_event_of_one_endless_line_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="longer than 10000 bytes"):
        await _read(b"data: " + b"x" * 20_000 + b"\n\n", size)


@pytest.mark.parametrize("line", [b"data: " + b"x" * 1000 + b"\n", b"data\n"])
async def test_an_event_of_endless_lines_is_refused_before_it_ends(line: bytes) -> None:
    limit_bytes, sent_bytes = 2**20, 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent_bytes
        piece = line * (2**16 // len(line))
        while sent_bytes < 30 * 2**20:
            sent_bytes += len(piece)
            yield piece

    with pytest.raises(ValueError, match=f"longer than {limit_bytes} bytes"):
        await anext(event_data(endless(), limit_bytes))
    assert sent_bytes < 2 * limit_bytes


async def test_many_events_together_may_be_longer_than_one() -> None:
    event = b"data: " + b"x" * 6_000
    assert await _read((event + b"\n\n") * 5, 100_000) == [event[6:]] * 5


# What is collected from an engine's chunks, including malformed ones.


def _chunk(delta: Any, ids: Any = None, finish: Any = None, index: Any = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [{"logprob": -1.0} for _ in ids]}}
    return {"choices": [choice]}


def _capture() -> Capture:
    return Capture(choices=1, keep_logprobs=False, keep_ids=False)


@pytest.mark.parametrize(
    "chunk",
    [
        _chunk({"content": "a"}, [1], finish=["stop"]),
        _chunk({"content": "a"}, [1], finish=7),
        _chunk({"content": "a"}, [1], index=-1),
        _chunk({"content": "a"}, [1], index=1),
        _chunk({"content": "a"}, [1], index="0"),
        _chunk({"tool_calls": [{"index": "x"}]}, [1]),
        _chunk(["a"]),
        {"choices": 5},
        {},
    ],
)
def test_a_malformed_chunk_is_refused(chunk: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, IndexError, KeyError, TypeError)):
        _capture().take_chunk(chunk)


def test_text_without_tokens_discards_all_tokens_of_the_choice() -> None:
    capture = _capture()
    capture.take_chunk(_chunk({"content": "a"}, [1]))
    capture.take_chunk(_chunk({"content": "b"}))
    [choice] = capture.choices
    assert (choice.response_ids, choice.logprobs) == (None, None)
    assert choice.unusable == "the engine sent text without token ids"
    assert choice.message() == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize("ids", [[2**40], [-1], [True], ["a"]])
def test_invalid_ids_are_discarded(ids: list[Any]) -> None:
    capture = _capture()
    capture.take_chunk(_chunk({"content": "a"}, ids))
    assert capture.choices[0].response_ids is None


#

few_ids = st.none() | st.lists(st.integers(0, 3), max_size=8).map(ids_to_bytes)
texts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6).map(tuple)
conversations = st.builds(
    Conversation,
    messages=texts,
    response=st.none() | st.sampled_from(["a", "b"]),
    prompt_ids=few_ids,
    response_ids=few_ids,
    tools_sha256=st.none(),
)
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(conversations, st.none() | conversations)
def test_a_delta_and_the_parent_rebuild_the_turn(turn: Conversation, parent: Conversation | None) -> None:
    stored = delta(turn, parent)

    assert stored.rebuilt_messages(parent) == turn.messages
    assert stored.rebuilt_prompt_ids(parent) == turn.prompt_ids
    assert (stored.prompt_shared is None) == (turn.prompt_ids is None)
    if parent is None:
        assert stored.messages_kept == 0


@given(conversations, conversations)
def test_a_delta_stores_nothing_that_could_be_shared(turn: Conversation, parent: Conversation) -> None:
    whole = replace(turn, messages=parent.texts + turn.messages, prompt_ids=parent.tokens + (turn.prompt_ids or b""))
    stored = delta(whole, parent)

    assert len(stored.messages_added) <= len(turn.messages)
    assert len(stored.prompt_ids or b"") <= len(turn.prompt_ids or b"")


@pytest.mark.parametrize(("one", "other"), [("1", "1.0"), ("1", "true"), ('{"a":1,"b":2}', '{"b":2,"a":1}')])
def test_values_equal_only_in_python_are_not_shared(one: str, other: str) -> None:
    parent = Conversation((one,), None, None, None, None)
    turn = Conversation((other,), None, None, None, None)
    assert json.loads(one) == json.loads(other)

    assert delta(turn, parent).messages_kept == 0


@given(json_values)
def test_json_text_round_trips_exactly(value: JsonValue) -> None:
    text = exact_json(value)
    assert json.dumps(json.loads(text)) == json.dumps(value)
    assert "\0" not in text
    assert exact_json(json.loads(text)) == text
    text.encode()


def test_a_lone_surrogate_round_trips() -> None:
    assert json.loads(exact_json("a\ud83d☃")) == "a\ud83d☃"


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_number_that_json_cannot_represent_is_rejected(number: float) -> None:
    with pytest.raises(RecordUnusable):
        exact_json({"x": [number]})


def test_json_nested_too_deeply_is_rejected() -> None:
    deep: JsonValue = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecordUnusable, match="nested too deeply"):
        exact_json(deep)


def test_storable_replaces_only_what_postgres_refuses() -> None:
    assert storable("☃ \0 \ud83d é") == "☃ \N{REPLACEMENT CHARACTER} ? é"


def test_the_size_in_memory_is_in_bytes_and_not_in_characters() -> None:
    plain = Conversation(("a" * 1000,), None, None, None, None)
    wide = Conversation(("語" * 1000,), None, None, None, None)
    assert wide.size_bytes - plain.size_bytes >= 1000
    assert wide.size_bytes >= sys.getsizeof(wide.messages[0])


# What is counted of a request's tokens, whatever becomes of them.


def chunk(ids: list[int] | None, prompt: int = 0, **fields: Any) -> dict[str, Any]:
    said = {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ids}], **fields}
    return said | ({"prompt_token_ids": [1] * prompt} if prompt else {})


def take(meter: TokenMeter, *chunks: dict[str, Any]) -> None:
    for one in chunks:
        meter.take(one, one)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("api.chat.key_limits.time.monotonic", lambda: now[0])
    return now


def test_prompt_and_reply_are_counted_over_all_attempts() -> None:
    meter = TokenMeter(1, None)
    meter.begin()
    take(meter, chunk([5, 6], prompt=10), chunk([7]))
    assert meter.total() == 13
    meter.begin()
    take(meter, chunk([5], prompt=10))
    assert meter.total() == 13 + 11


def test_without_ids_parts_are_counted_or_what_the_engine_reports() -> None:
    meter = TokenMeter(1, None)
    start = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    take(meter, start, chunk(None), chunk(None))
    assert meter.total() == 2
    take(meter, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}})
    assert meter.total() == 9


@pytest.mark.parametrize("usage", ["x", [], {"total_tokens": "x"}, {"total_tokens": -5}, {}])
def test_an_odd_report_counts_nothing(usage: Any) -> None:
    meter = TokenMeter(1, None)
    take(meter, chunk([5], usage=usage))
    assert meter.total() == 1


def test_a_request_that_is_cut_before_its_answer_counts_by_time(clock: list[float]) -> None:
    pace = Pace()
    ended = TokenMeter(2, None)
    ended.sending(400)
    take(ended, chunk([1] * 40))
    clock[0] += 2
    ended.set_pace(pace)  # 20 tokens in 2 s for each of two choices
    assert pace.tokens_in(3) == 30

    cut = TokenMeter(2, None)
    assert cut.total_of_cut(pace) == 0  # no engine had it
    cut.sending(400)
    clock[0] += 3
    assert cut.total_of_cut(pace) == 100 + 2 * 30
    bounded = TokenMeter(2, 7)
    bounded.sending(400)
    clock[0] += 3
    assert bounded.total_of_cut(pace) == 100 + 2 * 7
    take(bounded, chunk([1], prompt=10))
    assert bounded.total_of_cut(pace) == 11  # known, so nothing is estimated


def test_the_pace_is_that_of_the_newest_replies() -> None:
    pace = Pace()
    assert pace.tokens_in(10) == 0
    for _ in range(60):
        pace.take(10, 1)
    for _ in range(60):
        pace.take(50, 1)
    assert 49 <= pace.tokens_in(1) <= 50


# References in schemas of clients: followed, and refused where an engine would stumble.

STRING = {"type": "string"}
TREE = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}


def body(schema: Any, where: str = "response_format") -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    fields: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "text": {"structured_outputs": {"json": json.dumps(schema)}},
        "tag": {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        "tag_format": {"response_format": {"type": "structural_tag", **tag}},
        "structures": {"response_format": {"type": "structural_tag", "structures": [{"schema": schema}]}},
        "guided_json": {"guided_json": schema},
        "tools": {"tools": [tool], "tool_choice": "required"},
    }
    return {"messages": [{"role": "user", "content": "x"}], **fields[where]}


PLACES = ["response_format", "structured_outputs", "text", "tag", "tag_format", "structures", "guided_json", "tools"]


def in_places(*schemas: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Each schema in one place, and the last one in every place: how a place is read and how a schema is are apart."""
    return [(schema, PLACES[0]) for schema in schemas] + [(schemas[-1], place) for place in PLACES[1:]]


@pytest.mark.parametrize(
    ("schema", "where"),
    in_places(
        {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
        {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
        {"type": "object", "properties": {"a": STRING, "again": {"$ref": "#/properties/a"}, "self": {"$ref": "#"}}},
        {"type": "object", "properties": {"$ref": STRING, "json": STRING, "schema": {"$ref": "#/$defs/a/b~1c%20d"}}}
        | {"$defs": {"a": {"b/c d": STRING}}},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": STRING}},
        {"enum": [{"$ref": "nowhere"}], "default": {"$ref": "nowhere"}},
        {"prefixItems": [STRING, {"$ref": "#/prefixItems/0"}]},
        {"items": {"$ref": "#/$defs/yes"}, "$defs": {"yes": True}},
    ),
)
def test_references_within_a_schema_are_accepted(schema: dict[str, Any], where: str) -> None:
    check_bounds(body(schema, where), ChatBounds())


@pytest.mark.parametrize(
    ("schema", "where"),
    in_places(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [STRING, {"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"if": {"$ref": "#/properties/x"}}}},
        {"$ref": "https://example.com/schema"},
        {"$ref": "other.json"},
        {"$ref": "#anchor", "$defs": {"x": {"$anchor": "anchor"}}},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/$defs/a/0", "$defs": {"a": []}},
        {"$ref": "#/$defs/a", "$defs": {"a": "text"}},
        {"$ref": 1},
        {"$defs": {"unused": {"$ref": "#/nowhere"}}},
        {"$ref": "#/x-mine/a", "x-mine": {"a": {"items": {"$ref": "#/nowhere"}}}},
    ),
)
def test_other_references_are_refused_by_name(schema: dict[str, Any], where: str) -> None:
    sent = body(schema, where)
    with pytest.raises(RequestRejected) as refused:
        check_bounds(sent, ChatBounds())
    assert refused.value.status == 400
    assert refused.value.field in sent


def test_the_schemas_of_tools_that_are_not_compiled_are_left_alone() -> None:
    check_bounds(body({"$ref": "https://example.com/schema"}, "tools") | {"tool_choice": "auto"}, ChatBounds())


@pytest.mark.parametrize("key", ["json", "structural_tag"])
@pytest.mark.parametrize(
    "text", ['{"maxLength": NaN, "grammar": "root ::= x"}', '{"x": "\\ud800"}', "{", '{"a":' * 2000 + "1" + "}" * 2000]
)
def test_text_that_an_engine_would_read_and_the_gateway_not_is_refused(key: str, text: str) -> None:
    sent = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {key: text}}
    with pytest.raises(RequestRejected) as refused:
        check_bounds(sent, ChatBounds())
    assert (refused.value.status, refused.value.field) == (400, "structured_outputs")


def call(arguments: str) -> dict[str, Any]:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        '{"a":' * 200 + "1" + "}" * 200,
        "[" * 20_000,
        '{"a": NaN, "b":' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
)
def test_deep_arguments_in_the_history_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        check_bounds(call(arguments), ChatBounds())
    assert (refused.value.status, refused.value.field) == (400, "messages.1.tool_calls.0.function.arguments")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":' * 100 + "1" + "}" * 100,
        json.dumps({"code": "{[" * 5000}),
        '{"code": "' + "{[" * 5000,  # cut off by `max_tokens`
        json.dumps([{}] * 1000),
        "no JSON",
        "",
    ],
)
def test_other_arguments_are_not_touched(arguments: str) -> None:
    check_bounds(call(arguments), ChatBounds())


@pytest.mark.parametrize("where", PLACES)
def test_a_schema_is_as_deep_as_engines_take_it(where: str) -> None:
    schema: dict[str, Any] = STRING
    for _ in range(31):
        schema = {"type": "object", "properties": {"a": schema}}
    check_bounds(body(schema, where), ChatBounds())
    sent = body({"items": {"items": schema}}, where)
    with pytest.raises(RequestRejected, match="64 levels") as refused:
        check_bounds(sent, ChatBounds())
    assert refused.value.field in sent
