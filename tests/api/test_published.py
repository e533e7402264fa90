"""What is published of our routes, and what becomes of what others publish."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import re
import typing
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import anthropic.types.beta as messages_api
import httpx
import orjson
import pytest
from anthropic.types import ContentBlockParam, ToolUnionParam
from fastapi import APIRouter, FastAPI, Request
from openai.types.responses import ResponseInputItemParam, ToolParam
from starlette.responses import JSONResponse
from starlette.routing import Route

from api.app import create_app
from api.chat import fields
from api.chat.schemas import ChatCompletion, ChatCompletionChunk
from api.dependencies import Services
from api.openapi import CODES, REQUEST_EXAMPLES
from api.plain_route import PlainRoute
from api.wire.messages import translate_messages as from_messages
from api.wire.responses import check
from api.wire.responses import translate_responses as from_responses
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import RequestRejected
from tests.api.conftest import Gateway

# The OpenAPI description says what is true: keys, errors, chat's answers, no leftovers of docstrings.

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


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
    documented = set(re.findall(r"`(\w+)`", REFERENCE.read_text().split("\n## Errors\n")[1].split("\n## ")[0]))
    assert {code for codes in CODES.values() for code in codes} <= documented


async def test_every_operators_route_needs_an_operators_key(described: dict[str, Any], gateway: Gateway) -> None:
    forms = {"version": "1", "episode_id": "00000000-0000-7000-8000-000000000000"}
    refused: dict[str, tuple[int, int]] = {}
    async with httpx.AsyncClient(base_url=gateway.url) as stranger, gateway.client() as chat:
        for path, operations in described["paths"].items():
            for method in operations if path.startswith("/admin") else ():
                asked = re.sub(r"\{(\w+)\}", lambda name: forms.get(name[1], "0" * 64), path)
                answers = [await client.request(method, asked) for client in (stranger, chat)]
                refused[f"{method} {path}"] = (answers[0].status_code, answers[1].status_code)
    assert len(refused) > 40
    assert {route: statuses for route, statuses in refused.items() if statuses != (401, 403)} == {}


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


# What becomes of every item, block and tool that OpenAI's and Anthropic's packages publish, and of vLLM's fields.

FUNCTION = {"type": "function", "name": "now", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "clock", "description": "c", "tools": [FUNCTION]}
CUSTOM = {"type": "custom", "name": "patch"}
# The calls that results answer; each item stands in a history that has them.
CALLS = [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}]
SAID = "UNIQUE"
# Items of Responses, each with what must be in the chat request: a role and a text in its message, `tools`, `ignored`,
# `nothing`, or `refused`.
ITEMS: dict[str, tuple[dict[str, Any], str]] = {
    "message": ({"role": "user", "content": SAID}, "user"),
    "reasoning": ({"id": "r", "summary": [{"type": "summary_text", "text": SAID}]}, "reasoning"),
    "function_call": ({"call_id": "c9", "name": "f", "arguments": f'{{"a": "{SAID}"}}'}, "call"),
    "function_call_output": ({"call_id": "c1", "output": SAID}, "tool"),
    "custom_tool_call": ({"call_id": "c9", "name": "patch", "input": SAID}, "call"),
    "custom_tool_call_output": ({"call_id": "c1", "output": SAID}, "tool"),
    "tool_search_call": ({"call_id": "c9", "execution": "client", "arguments": {"query": SAID}}, "call"),
    "tool_search_output": ({"call_id": "c1", "execution": "client", "tools": [NAMESPACE]}, "tools"),
    "additional_tools": ({"role": "developer", "tools": [NAMESPACE]}, "tools"),
    "local_shell_call": (
        {"id": "l", "call_id": "c9", "status": "completed", "action": {"type": "exec", "command": [SAID], "env": {}}},
        "call",
    ),
    "local_shell_call_output": ({"id": "c1", "output": SAID}, "tool"),
    "shell_call": ({"call_id": "c9", "action": {"commands": [SAID]}}, "call"),
    "shell_call_output": (
        {"call_id": "c1", "output": [{"stdout": SAID, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        "tool",
    ),
    "apply_patch_call": (
        {"call_id": "c9", "status": "completed", "operation": {"type": "delete_file", "path": SAID}},
        "call",
    ),
    "apply_patch_call_output": ({"call_id": "c1", "status": "completed", "output": SAID}, "tool"),
    "computer_call": (
        {"id": "x", "call_id": "c9", "pending_safety_checks": [], "action": {"type": "type", "text": SAID}},
        "call",
    ),
    "computer_call_output": (
        {"call_id": "c1", "output": {"type": "computer_screenshot", "image_url": f"https://x/{SAID}.png"}},
        "tool",
    ),
    "program": ({"id": "p", "call_id": "c9", "code": SAID, "fingerprint": "f"}, "call"),
    "program_output": ({"id": "p", "call_id": "c1", "result": SAID, "status": "completed"}, "tool"),
    "mcp_call": ({"id": "m", "server_label": "s", "name": "n", "arguments": "{}", "output": SAID}, "tool"),
    "code_interpreter_call": (
        {"id": "ci", "container_id": "c", "code": "1+1", "outputs": [{"type": "logs", "logs": SAID}]},
        "tool",
    ),
    "file_search_call": ({"id": "fs", "queries": ["q"], "status": "completed", "results": [{"text": SAID}]}, "tool"),
    "web_search_call": (
        {"id": "ws", "status": "completed", "action": {"type": "search", "query": SAID}},
        "assistant",
    ),
    "image_generation_call": (
        {"id": "ig", "status": "completed", "result": "AAAA", "revised_prompt": SAID},
        "assistant",
    ),
    "mcp_list_tools": ({"id": "ml", "server_label": SAID, "tools": []}, "assistant"),
    "mcp_approval_request": ({"id": "ma", "arguments": "{}", "name": SAID, "server_label": "s"}, "assistant"),
    "mcp_approval_response": ({"approval_request_id": SAID, "approve": True}, "user"),
    "compaction": ({"encrypted_content": "gAAA"}, "nothing"),
    "configuration_update": ({"reasoning": {"effort": "low"}}, "ignored"),
    "item_reference": ({"id": "x"}, "refused"),
    "compaction_trigger": ({}, "refused"),
}
# Tools of Responses: shown to the model as this function, or named in `X-Clawloop-Ignored`.
OUR_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    "function": (FUNCTION, "now"),
    "namespace": (NAMESPACE, "clock__now"),
    "custom": (CUSTOM, "patch"),
    "tool_search": ({"type": "tool_search", "execution": "client"}, "tool_search"),
}
THEIR_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    name: ({"type": name}, "ignored")
    for name in (
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    )
}
RESPONSES_TOOLS = OUR_TOOLS | THEIR_TOOLS
RESULT: dict[str, Any] = {"tool_use_id": "t1"}
SERVER_RESULT: dict[str, Any] = {"tool_use_id": "s1", "content": {"type": "x", "stdout": SAID}}
# Blocks of Messages, with the role of the message in which clients send them.
_Block: TypeAlias = tuple[str, dict[str, Any], str]
OTHER_BLOCKS: dict[str, _Block] = {
    "text": ("user", {"text": SAID}, "user"),
    "image": ("user", {"source": {"type": "url", "url": f"https://x/{SAID}.png"}}, "user"),
    "document": ("user", {"source": {"type": "text", "media_type": "text/plain", "data": SAID}}, "user"),
    "search_result": ("user", {"source": "s", "title": "t", "content": [{"type": "text", "text": SAID}]}, "user"),
    "tool_result": ("user", RESULT | {"content": SAID}, "tool"),
    "container_upload": ("user", {"file_id": SAID}, "user"),
    "thinking": ("assistant", {"thinking": SAID, "signature": ""}, "reasoning"),
    "redacted_thinking": ("assistant", {"data": "AAAA"}, "nothing"),
    "fallback": ("assistant", {"from": {"model": "a"}, "to": {"model": "b"}}, "nothing"),
    "tool_use": ("assistant", {"id": "t9", "name": "f", "input": {"a": SAID}}, "call"),
    "server_tool_use": ("assistant", {"id": "s1", "name": "web_search", "input": {"query": SAID}}, "assistant"),
    "mcp_tool_use": ("assistant", {"id": "s1", "name": "n", "server_name": "s", "input": {"q": SAID}}, "assistant"),
    "mcp_tool_result": ("assistant", {"tool_use_id": "s1", "content": SAID}, "assistant"),
    "mcp_tool_listing": ("system", {"mcp_server_name": SAID, "tools": []}, "system"),
    "compaction": ("assistant", {"content": SAID}, "assistant"),
    "tool_addition": ("system", {"tool": {"type": "tool_reference", "name": "deferred"}}, "tools"),
    "tool_removal": ("system", {"tool": {"type": "tool_reference", "name": SAID}}, "system"),
    "tool_search_tool_result": (
        "assistant",
        {
            "tool_use_id": "s1",
            "content": {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "deferred"}],
            },
        },
        "tools",
    ),
    "tool_reference": ("user", {"tool_name": "deferred"}, "tools"),
    "browser_state": ("user", {"url": SAID}, "user"),
}
_KEPT: _Block = ("assistant", SERVER_RESULT, "assistant")
BLOCKS = OTHER_BLOCKS | dict.fromkeys(
    (
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ),
    _KEPT,
)
MESSAGES_TOOLS_OF_THEIRS = (
    "advisor",
    "bash",
    "browser_toolset",
    "code_execution",
    "computer",
    "mcp_toolset",
    "memory",
    "text_editor",
    "tool_search_tool",
    "web_fetch",
    "web_search",
)


def types_in(union: Any) -> Iterator[str]:
    """The values of `type` of every member of a union of typed dicts."""
    for member in typing.get_args(union):
        if not hasattr(member, "__annotations__"):
            yield from types_in(member)
            continue
        module = importlib.import_module(member.__module__)
        names = vars(typing) | vars(module)
        annotation = member.__annotations__.get("type")
        if isinstance(annotation, typing.ForwardRef):
            annotation = eval(annotation.__forward_arg__, names)
        yield from literals_in(annotation)


def literals_in(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for inner in typing.get_args(annotation):
            yield from literals_in(inner)


def undecided(published: Iterator[str], decided: Any, table: str) -> str:
    left = sorted(set(published) - set(decided))
    return "".join(f"{name!r} is published and not in {table}: say what becomes of it\n" for name in left)


def test_every_published_item_and_tool_of_responses_is_decided() -> None:
    assert len(set(types_in(ResponseInputItemParam))) > 20
    assert not undecided(types_in(ResponseInputItemParam), ITEMS, "ITEMS")
    assert not undecided(types_in(ToolParam), RESPONSES_TOOLS, "RESPONSES_TOOLS")


def test_every_published_block_and_tool_of_messages_is_decided() -> None:
    assert len(set(types_in(messages_api.BetaContentBlockParam))) > 15
    assert not undecided(types_in(messages_api.BetaContentBlockParam), BLOCKS, "BLOCKS")
    assert not undecided(types_in(ContentBlockParam), BLOCKS, "BLOCKS")
    contents = importlib.import_module("anthropic.types.beta.beta_tool_result_block_param").Content
    assert not undecided(types_in(contents), BLOCKS, "BLOCKS")
    for union in (messages_api.BetaToolUnionParam, ToolUnionParam):
        others = [name for name in types_in(union) if name != "custom"]
        assert others
        unknown = [name for name in others if not name.startswith(MESSAGES_TOOLS_OF_THEIRS)]
        assert not undecided(iter(unknown), (), "MESSAGES_TOOLS_OF_THEIRS")


def find(chat: dict[str, Any], becomes: str) -> bool:
    """Whether what was said is where it should be."""
    messages = chat["messages"]
    if becomes == "call":
        return any(SAID in orjson.dumps(each.get("tool_calls")).decode() for each in messages)
    if becomes == "reasoning":
        return any(SAID in each.get("reasoning_content", "") for each in messages)
    return any(each["role"] == becomes and SAID in orjson.dumps(each["content"]).decode() for each in messages)


@pytest.mark.parametrize("kind", ITEMS)
def test_what_becomes_of_an_item(kind: str) -> None:
    item, becomes = ITEMS[kind]
    body = {"model": "policy", "input": [*CALLS, {"type": kind} | item, {"role": "user", "content": "go on"}]}
    check(body)
    if becomes == "refused":
        with pytest.raises(RequestRejected, match=r"input\.1"):
            from_responses(body, (), [])
        return
    translated = from_responses(body, (), [])
    chat = translated.body
    assert "AAAA" not in orjson.dumps(chat).decode()
    if becomes == "tools":
        assert [tool["function"]["name"] for tool in chat["tools"]] == ["clock__now"]
        assert translated.origins["clock__now"].namespace == "clock"
    elif becomes == "ignored":
        assert translated.ignored == (f"input.1.{kind}",)
    elif becomes != "nothing":
        assert find(chat, becomes)


@pytest.mark.parametrize("kind", RESPONSES_TOOLS)
def test_what_becomes_of_a_tool_of_responses(kind: str) -> None:
    tool, becomes = RESPONSES_TOOLS[kind]
    translated = from_responses({"model": "policy", "input": "x", "tools": [tool]}, (), [])
    if becomes == "ignored":
        assert translated.ignored == (f"tools.0.{kind}",)
        assert "tools" not in translated.body
    else:
        assert [each["function"]["name"] for each in translated.body["tools"]] == [becomes]
        assert translated.ignored == ()


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_becomes_of_a_block(kind: str) -> None:
    role, block, becomes = BLOCKS[kind]
    called = [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]
    deferred = {"name": "deferred", "input_schema": {"type": "object"}, "defer_loading": True}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": called},
        {"role": role, "content": [{"type": kind} | block]},
        {"role": "user", "content": "go on"},
    ]
    chat = from_messages({"model": "policy", "max_tokens": 5, "messages": messages, "tools": [deferred]}, ()).body
    assert "AAAA" not in orjson.dumps(chat).decode()
    assert ("tools" in chat) == (becomes == "tools")
    if becomes not in ("tools", "nothing"):
        assert find(chat, becomes)


def test_a_type_that_no_package_publishes_is_kept_as_text() -> None:
    strange = {"type": "hologram", "id": "h", "said": SAID}
    chat = from_responses({"model": "policy", "input": [strange, {"role": "user", "content": "x"}]}, (), []).body
    assert chat["messages"][0] == {"role": "user", "content": f'[hologram] {{"said":"{SAID}"}}'}
    messages = [{"role": "user", "content": [strange]}]
    chat = from_messages({"model": "policy", "max_tokens": 5, "messages": messages}, ()).body
    assert chat["messages"] == [{"role": "user", "content": f'[hologram] {{"said":"{SAID}"}}'}]


def test_a_function_that_stands_for_another_tool_never_hides_one() -> None:
    plain = FUNCTION | {"name": "clock__now"}
    chat = from_responses({"model": "policy", "input": "x", "tools": [plain, NAMESPACE]}, (), []).body
    names = [tool["function"]["name"] for tool in chat["tools"]]
    assert len(names) == len(set(names)) == 2


def fields_in(source: str, model: str) -> list[str]:
    """Of a model, read without importing its module, which takes a minute."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == model]
    annotated = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in annotated if isinstance(target, ast.Name) and not target.id.startswith("_")]


def test_every_field_of_vllm_is_decided() -> None:
    """Passed on, refused, or ours: what the engine is asked for is the gateway's, what the client sees is filtered."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations
    source = Path(vllm.submodule_search_locations[0]) / "entrypoints" / "openai" / "chat_completion" / "protocol.py"
    names = fields_in(source.read_text(), "ChatCompletionRequest")
    assert "include_reasoning" in names
    ours = fields._OUR_FIELDS | fields.CLAWLOOP_FIELDS
    decided = [fields._ENGINE_FIELDS, fields._REFUSED_FIELDS, ours]
    for name in names:
        assert sum(name in group for group in decided) == 1, f"{name!r} is a field of vLLM's: say what becomes of it"


# The routes of the application.

ASSETS = Path(__file__).resolve().parents[2] / "api" / "docs_assets"


@asynccontextmanager
async def never_opened() -> AsyncIterator[Services]:
    raise AssertionError("the server was started")
    yield


def test_frameworks_own_pages_which_load_scripts_from_another_site_are_off() -> None:
    paths = {route.path for route in create_app(never_opened).routes if isinstance(route, Route)}
    assert {"/openapi.json", "/docs"} <= paths
    assert "/redoc" not in paths


async def test_the_docs_load_files_of_this_package_alone(gateway: Gateway) -> None:
    async with gateway.client() as client:
        page = await client.get("/docs", headers={"Authorization": ""})
        assert "script-src 'self'; style-src 'self';" in page.headers["content-security-policy"]
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(loaded) == 4
        for address in loaded:
            assert address == "data:," or (await client.get(address)).status_code == 200
        assert "<script>" not in page.text
        assert (await client.get("/docs/..%2fdocs.py")).status_code == 404
        assert (await client.get("/docs/README.md")).status_code == 404


def test_the_docs_assets_are_those_of_their_package() -> None:
    for line in (ASSETS / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
        assert name in (ASSETS / "README.md").read_text()


# A route that takes the request alone goes past FastAPI's dependencies; another one does not.

router = APIRouter(route_class=PlainRoute)


@router.post("/plain")
async def plain(request: Request) -> JSONResponse:
    """A plain one."""
    return JSONResponse({"stacks": "fastapi_function_astack" in request.scope})


@router.get("/named/{name}")
async def named(request: Request, name: str) -> JSONResponse:
    return JSONResponse({"name": name, "stacks": "fastapi_function_astack" in request.scope})


async def test_only_a_route_that_takes_the_request_alone_is_plain() -> None:
    app = FastAPI()
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        assert (await client.post("/plain")).json() == {"stacks": False}
        assert (await client.get("/named/x")).json() == {"name": "x", "stacks": True}
        assert (await client.get("/openapi.json")).json()["paths"]["/plain"]["post"]["description"] == "A plain one."
