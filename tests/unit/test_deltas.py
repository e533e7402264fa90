from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.errors import RecordUnusable
from db.content import exact_json, ids_to_bytes, storable
from db.turns.read import Conversation, delta

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
