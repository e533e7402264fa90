"""The OpenAPI description: who may call what, the errors as they are, and bodies that routes read or write themselves.

FastAPI describes parameters and the answers of admin routes; the rest is added here. Docstrings of models become the
descriptions of their fields.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from api.chat.answer_schemas import ChatCompletion, ChatCompletionChunk
from api.chat.completions import CompletionRequest
from api.chat.schemas import ChatRequest
from api.request_examples import REQUEST_EXAMPLES
from api.wire.messages_request import CountTokensRequest, MessagesRequest
from api.wire.responses_request import ResponsesRequest

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
    403: ("insufficient_scope", "origin_not_allowed"),
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
"""Codes of errors by status, the common ones; docs/operating.md has all."""

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
