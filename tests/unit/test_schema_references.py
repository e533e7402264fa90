"""References in schemas of clients: followed, and refused where an engine would stumble."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.chat.bounds import check_bounds
from clawloop.core.errors import RequestRejected
from clawloop.core.settings import ChatBounds

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
