"""The OpenAPI description of the gateway and `GET /docs`, which shows it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, JsonValue
from starlette.responses import Response

from api.chat.routes import CompletionRequest
from api.chat.schemas import ChatCompletion, ChatCompletionChunk, ChatRequest
from api.wire.messages import CountTokensRequest, MessagesRequest
from api.wire.responses import ResponsesRequest
from clawloop.core.errors import RequestRejected

# Examples -------------------------------------------------------------------------------------------------------------
# An example of the body of each request that has one, by method and path, for the OpenAPI description.
#
# A test sends each of them: what stands here is accepted.

_EXAMPLE_CHAT: list[JsonValue] = [{"role": "user", "content": "Explain the tides in one sentence."}]

REQUEST_EXAMPLES: dict[str, JsonValue] = {
    "POST /v1/chat/completions": {"model": "policy", "messages": _EXAMPLE_CHAT, "stream": False},
    "POST /v1/completions": {"model": "policy", "prompt": "Once upon", "max_tokens": 32},
    "POST /v1/messages": {"model": "policy", "max_tokens": 256, "messages": _EXAMPLE_CHAT},
    "POST /v1/messages/count_tokens": {"model": "policy", "messages": _EXAMPLE_CHAT},
    "POST /v1/responses": {"model": "policy", "input": "Explain the tides in one sentence."},
    "POST /v1/responses/input_tokens": {"model": "policy", "input": "Explain the tides in one sentence."},
    "POST /v1/feedback": {
        "response_id": "chatcmpl-01980000000070008000000000000000",
        "rating": "down",
        "text": "Too long.",
    },
    "POST /admin/v1/engines": {"url": "http://127.0.0.1:8101", "require_guard": False},
    "POST /admin/v1/engines/{engine}/drain": {"undo": False, "force": False},
    "PUT /admin/v1/worker/artifacts/{digest}": "",  # an archive without files
    "POST /admin/v1/keys": {"scopes": ["chat"], "name": "my agent", "policy": "default"},
    "PUT /admin/v1/keys/{prefix}/limits": {"requests_per_minute": 60, "tokens_per_minute": 100_000, "concurrency": 4},
    "POST /admin/v1/training/pause": {"reason": "On holiday until Monday."},
    "POST /admin/v1/training/resume": {"retry": False},
    "POST /admin/v1/policies": {"name": "anna", "like": "default"},
    "POST /admin/v1/policies/{policy}/roll-back": {"version": 0, "recipe": {"name": "combined"}},
    "POST /admin/v1/policies/{policy}/release": {"version": 3},
    "POST /admin/v1/policies/{policy}/pin": {"version": 0},
    "POST /admin/v1/policies/{policy}/recipe": {"name": "combined", "train": {"batch_samples": 16}},
    "POST /admin/v1/policies/{policy}/lessons": {"text": "Answer in one or two short sentences."},
    "POST /admin/v1/policies/{policy}/probes": {
        "probes": [
            {"prompt": "What is 2 + 2?", "contains": ["4"]},
            {"prompt": "Name a prime number below 10.", "regex": "\\b[2357]\\b"},
        ]
    },
    "POST /admin/v1/policies/{policy}/versions/{version}/compare": {"prompts": ["Explain the tides."]},
    "POST /admin/v1/judge/history": {"turns": 20, "apply": False},
    "POST /admin/v1/rollouts/start": {"environment": "terminal", "size": 8, "groups": 2, "barren": 20},
    "POST /admin/v1/rollouts/pause": {"reason": "The engine is needed for chats."},
}


# The description ------------------------------------------------------------------------------------------------------
# The OpenAPI description: who may call what, the errors as they are, and bodies that routes read or write themselves.
#
# FastAPI describes parameters and the answers of admin routes; the rest is added here. Docstrings of models become the
# descriptions of their fields.

CODES: dict[int, tuple[str, ...]] = {
    400: (
        "ambiguous_id",
        "context_length_exceeded",
        "invalid_http",
        "invalid_json",
        "invalid_probe",
        "invalid_recipe",
        "invalid_request",
        "invalid_value",
        "missing_required_parameter",
        "request_too_complex",
        "unsupported_parameter",
    ),
    401: ("invalid_api_key",),
    403: ("insufficient_scope", "origin_not_allowed", "policy_not_allowed"),
    404: ("model_not_found", "not_found"),
    408: ("client_too_slow", "upload_timeout"),
    409: ("episode_not_running", "last_engine", "version_pinned", "recipe_conflict"),
    413: ("body_too_large",),
    421: ("host_not_allowed",),
    429: ("engines_busy", "rate_limit_exceeded", "too_many_structured_requests"),
    431: ("headers_too_large",),
    500: ("internal_error",),
    502: ("engine_broke", "engine_answer_unusable"),
    503: ("engine_unavailable", "store_unavailable", "temporal_unavailable"),
}
"""Codes of errors by status, the common ones; docs/reference.md has all."""

_BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    ChatCompletion,
    ChatCompletionChunk,
)
_CHAT = "/v1/chat/completions"
_CHAT_ANSWER = {
    "description": "The reply: one object, or with `stream` its chunks as server-sent events, then `[DONE]`.",
    "headers": {
        "X-Clawloop-Ignored": {"description": "fields that were dropped", "schema": {"type": "string"}},
        "X-Clawloop-Changed": {
            "description": "what was changed for the model: `roles`, `max_tokens=N`",
            "schema": {"type": "string"},
        },
    },
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/ChatCompletion"}},
        "text/event-stream": {"schema": {"$ref": "#/components/schemas/ChatCompletionChunk"}},
    },
}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "what is wrong and how to fix it"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
    "example": {
        "error": {
            "message": "The model 'gpt-4' does not exist here. Use policy; GET /v1/models lists all.",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    },
}
_PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "field"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string", "description": "the status in words"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what is wrong and how to fix it"},
        "code": {"type": ["string", "integer", "null"]},
        "field": {"type": ["string", "null"], "description": "the field at fault"},
    },
    "example": {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": "e0 is the only engine that takes requests.",
        "code": "last_engine",
        "field": "engine",
    },
}
_SCHEMES = {
    "chatKey": {"type": "http", "scheme": "bearer", "description": "An API key with the scope `chat`."},
    "adminKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key with the scope `admin`, or `worker` for `/admin/v1/worker`.",
    },
}
_TAGS = {
    "chat": "Chat in OpenAI's and Anthropic's wire formats, and the names of models.",
    "feedback": "Ratings and comments.",
    "health": "Whether a gateway lives and should get traffic, and its metrics. Without a key.",
    "sessions": "What was said, and what became of it.",
    "judging": "Judging again, and comparing judges.",
    "training": "Policies, versions, recipes, probes, and steering them.",
    "rollouts": "Episodes of agents in sandboxes.",
    "engines": "The servers that answer.",
    "keys": "API keys and their limits.",
    "ledger": "Whether all rows agree.",
}
_ARGUMENT = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)$")


def describe(app: FastAPI) -> None:
    """Make `app.openapi` complete."""
    of_fastapi = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        description = of_fastapi()
        info = description["info"]
        info["version"] = version("clawloop")
        info["description"] = "A gateway to a model that learns from its own conversations."
        description["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
        components = description.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for body in _BODIES:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas |= {"OpenAIError": _OPENAI_ERROR, "Problem": _PROBLEM}
        components["securitySchemes"] = _SCHEMES
        for schema in schemas.values():
            _split_docstring(schema)
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                _complete(path, operation)
                _show_example(f"{method.upper()} {path}", operation)
        description["paths"][_CHAT]["post"]["responses"]["200"] = _CHAT_ANSWER
        return description

    app.openapi = complete  # type: ignore[method-assign]


def _complete(path: str, operation: dict[str, Any]) -> None:
    if "description" in operation:
        operation["description"] = re.split(r"\n\s*(?:Args|Returns|Raises):\n", operation["description"])[0].strip()
    is_admin = path.startswith("/admin")
    needs_key = is_admin or path.startswith("/v1")
    operation["security"] = [{"adminKey" if is_admin else "chatKey": []}] if needs_key else []
    operation.setdefault("tags", ["chat" if path.startswith("/v1") else "health"])
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own, which no route gives
    if not needs_key:
        return
    media = "application/problem+json" if is_admin else "application/json"
    reference = {"$ref": f"#/components/schemas/{'Problem' if is_admin else 'OpenAIError'}"}
    for status, codes in CODES.items():
        if (status == 409 and not is_admin) or (status in (429, 502) and is_admin):
            continue
        named = ", ".join(f"`{code}`" for code in codes)
        responses.setdefault(str(status), {"description": named, "content": {media: {"schema": reference}}})


def _show_example(route: str, operation: dict[str, Any]) -> None:
    if route in REQUEST_EXAMPLES:
        for form in operation["requestBody"]["content"].values():
            form["example"] = REQUEST_EXAMPLES[route]


def _split_docstring(schema: dict[str, Any]) -> None:
    """Move what a model's docstring says of its fields to the fields."""
    before, found, after = schema.get("description", "").partition("Args:\n")
    if not found:
        return
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in after.splitlines():
        if (argument := _ARGUMENT.match(line)) is not None:
            names = argument[1].split(", ")
            texts |= dict.fromkeys(names, argument[2])
        elif line.strip():
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    for name, field in schema.get("properties", {}).items():
        if name in texts:
            field.setdefault("description", texts[name])
    schema.pop("description")
    if before.strip():
        schema["description"] = before.strip()


# GET /docs ------------------------------------------------------------------------------------------------------------
# `GET /docs`: the API's description to read and try, from files of this package alone.

_FOLDER = Path(__file__).parent / "docs_assets"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_FILES = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
# Swagger UI draws its icons from data: addresses. It needs neither eval nor styles in the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Clawloop: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/initializer.js"></script>
</body>
</html>
"""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def page() -> Response:
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")


@router.get("/docs/{asset}")
async def asset(asset: str) -> Response:
    if (content := _FILES.get(asset)) is None:
        raise RequestRejected(f"There is no asset {asset!r}.", status=404, code="not_found")
    return Response(content, headers=_HEADERS, media_type=_TYPES[Path(asset).suffix])
