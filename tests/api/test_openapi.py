"""The OpenAPI description says what is true: keys, errors, chat's answers, no leftovers of docstrings."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from api.app import create_app
from api.chat.schemas import ChatCompletion, ChatCompletionChunk
from api.openapi import CODES, REQUEST_EXAMPLES
from clawloop.core.contracts.serving import Scope
from tests.api.conftest import Gateway

OPERATING = Path(__file__).resolve().parents[2] / "docs" / "operating.md"


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return create_app(lambda: pytest.fail("no service is needed to describe routes")).openapi()


def test_each_operation_names_its_key_its_tag_and_its_errors(described: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in described["tags"]}
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert set(operation["tags"]) <= tags, path
            assert "422" not in operation["responses"]
            scheme = [name for needed in operation["security"] for name in needed]
            if path.startswith("/admin"):
                assert scheme == ["adminKey"]
                assert "application/problem+json" in operation["responses"]["401"]["content"]
            elif path.startswith("/v1"):
                assert scheme == ["chatKey"]
                assert "application/json" in operation["responses"]["401"]["content"]
            else:
                assert scheme == []


def test_no_docstring_is_left_over_and_fields_are_described(described: dict[str, Any]) -> None:
    assert re.findall(r"(?:Args|Raises|Returns):", json.dumps(described)) == []
    session = described["components"]["schemas"]["SessionView"]
    assert session["properties"]["title"]["description"].startswith("the beginning of what the user said first")
    assert "HTTPValidationError" not in described["components"]["schemas"]


def test_its_error_codes_are_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", OPERATING.read_text().split("\n## Errors\n")[1].split("\n## ")[0]))
    assert {code for codes in CODES.values() for code in codes} <= documented


async def test_chats_are_answered_as_described(gateway: Gateway) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    async with gateway.client() as client:
        whole = await client.post("/v1/chat/completions", json=body)
        ChatCompletion.model_validate(whole.json())
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
        events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            ChatCompletionChunk.model_validate_json(event)


async def test_a_problem_is_titled_by_its_status(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        problem = (await client.get("/admin/v1/turns/nobody")).json()
    assert (problem["type"], problem["title"], problem["code"]) == ("about:blank", "Not Found", "not_found")


async def test_metrics_and_description_may_need_a_key(fresh_gateway: Gateway) -> None:
    reader = fresh_gateway.keys.add("default", {Scope.READ})
    async with fresh_gateway.client() as chat, fresh_gateway.client(reader) as read:
        for page in ("/metrics", "/openapi.json"):
            assert (await chat.get(page, headers={"Authorization": ""})).status_code == 200
        fresh_gateway.services.guarded_pages = frozenset({"metrics", "openapi"})
        for page in ("/metrics", "/openapi.json"):
            assert (await chat.get(page, headers={"Authorization": ""})).status_code == 401
            assert (await chat.get(page)).status_code == 403
            assert (await read.get(page)).status_code == 200


def bodies(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The forms of each route's body, by the route."""
    return {
        f"{method.upper()} {path}": operation["requestBody"]["content"]
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation
    }


def test_each_body_has_an_example(described: dict[str, Any]) -> None:
    found = bodies(described)
    assert found.keys() == REQUEST_EXAMPLES.keys()
    for route, forms in found.items():
        assert [form["example"] for form in forms.values()] == [REQUEST_EXAMPLES[route]], route


@pytest.mark.parametrize("route", REQUEST_EXAMPLES)
async def test_each_example_is_accepted(fresh_gateway: Gateway, route: str) -> None:
    method, path = route.split(" ")
    # A prefix and an engine that there are not: the body is what is read first.
    places = {"policy": "default", "version": "1", "engine": "nobody", "prefix": "cl-00000000"}
    places["digest"] = sha256(b"").hexdigest()  # of the empty example
    example = REQUEST_EXAMPLES[route]
    sent = example if isinstance(example, str) else json.dumps(example)
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    key = fresh_gateway.admin_key if path.startswith("/admin") else fresh_gateway.key
    async with fresh_gateway.client(key) as client:
        answer = await client.request(method, path.format(**places), content=sent, headers=headers)
    assert answer.status_code in (200, 201, 202, 404, 409), answer.text
    if path.startswith("/v1/") and "feedback" not in path:
        assert answer.status_code == 200, answer.text
