"""Errors as HTTP answers: OpenAI's shape on `/v1`, problem+json (RFC 9457) on `/admin`, never a stack trace."""

from __future__ import annotations

import logging
import math
import re
from http import HTTPStatus

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from clawloop.core.errors import (
    AmbiguousId,
    ClawloopError,
    ContentUnreadable,
    EncryptionKeyMissing,
    EngineAnswerUnusable,
    EngineBroke,
    EngineRejected,
    EnginesBusy,
    EngineUnavailable,
    NotFound,
    RecipeRejected,
    RequestRejected,
    SignalFailed,
    StateConflict,
    StoreUnavailable,
    ValueRejected,
)

log = logging.getLogger(__name__)

# An engine restarts within about a minute; PostgreSQL and Temporal within seconds.
ENGINE_RETRY_SECONDS = 10
# After this time some of the running replies have ended.
BUSY_RETRY_SECONDS = 30
STORE_RETRY_SECONDS = 2
TEMPORAL_RETRY_SECONDS = 5
# nginx's status for a client that disconnected before it was answered.
CLIENT_CLOSED_REQUEST = 499

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MESSAGES = "/v1/messages"
# Parts of OpenAI's and Anthropic's APIs that Clawloop does not have, by the beginning of their path.
_UNSUPPORTED = {
    "/v1/embeddings": "Embeddings",
    "/v1/files": "Files",
    "/v1/uploads": "Uploads",
    "/v1/audio": "Audio",
    "/v1/images": "Image generation",
    "/v1/videos": "Video generation",
    "/v1/moderations": "Moderations",
    "/v1/batches": "Batches",
    "/v1/messages/batches": "Batches",
    "/v1/fine_tuning": "Fine-tuning jobs",
    "/v1/vector_stores": "Vector stores",
    "/v1/assistants": "Assistants",
    "/v1/threads": "Threads",
    "/v1/conversations": "Conversations",
    "/v1/realtime": "Realtime sessions",
    "/v1/complete": "Anthropic's text completions",
    "/v1/rerank": "Reranking",
    "/v1/score": "Scoring",
}
# vLLM's code is the HTTP status as a number; clients look for OpenAI's code.
CONTEXT_OVERFLOW = "context_length_exceeded"
_NO_PARSER = "--enable-auto-tool-choice"
_CONTEXT_OVERFLOW = (
    "maximum context length",
    "cannot be greater than max_model_len",
    "longer than the maximum model length",
)
# What the engine says of a prompt that is too long: tokens, or characters that are at least so many.
_TOO_LONG = (
    re.compile(r"context length is (?P<most>\d+) tokens\b.*?contains (?:at least )?(?P<tokens>\d+) input tokens"),
    re.compile(
        r"context length is (?P<most>\d+) tokens\b.*?contains (?P<given>\d+) characters \(more than (?P<bound>\d+)"
    ),
    re.compile(r"[Ll]ength (?:of )?\(?(?P<tokens>\d+)\)?.*?(?:context length|model length of) ?\(?(?P<most>\d+)"),
    re.compile(r"context length is (?P<most>\d+) tokens"),
)
# Pydantic puts the member of a union that it tried into the field's name.
_UNION_MEMBER = re.compile(r"(?:constrained|function)-|(?:literal|list|dict)\[")


class Problem:
    """An error as the caller gets it.

    Args:
        status: HTTP status.
        message: for the caller.
        code: machine-readable, OpenAI's where it has one.
        field: the field at fault; None if it is not one field.
        kind: OpenAI's error type; None takes the status's.
        retry_after: value of the Retry-After header; None sends none.
        too_long: tokens of the prompt, at least so many, and the most that the model takes.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | int | None,
        *,
        field: str | None = None,
        kind: str | None = None,
        retry_after: str | None = None,
        too_long: tuple[int, int] | None = None,
    ) -> None:
        self.too_long = too_long
        self.status = status
        self.message = message
        self.code = code
        self.field = field
        self.kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after = retry_after

    def openai(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}
        )

    def anthropic(self) -> bytes:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = self.message
        if self.too_long is not None:
            # Anthropic's words, by which clients know that they have to compact the conversation, and by how much.
            message = "prompt is too long: {} tokens > {} maximum".format(*self.too_long)
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})

    def response(self, path: str, *, anthropic: bool = False) -> Response:
        """The error in the form of its path.

        Args:
            anthropic: the client speaks Anthropic's API, on a path that both APIs have.
        """
        headers = {"Retry-After": self.retry_after} if self.retry_after is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if path.startswith("/admin"):
            problem = {"type": "about:blank", "title": HTTPStatus(self.status).phrase, "status": self.status}
            problem |= {"detail": self.message, "code": self.code, "field": self.field}
            body = orjson.dumps(problem)
            return Response(body, self.status, headers, media_type="application/problem+json")
        body = self.anthropic() if anthropic or path.startswith(_MESSAGES) else self.openai()
        return Response(body, self.status, headers, media_type="application/json")


def to_problem(error: ClawloopError) -> Problem:
    """The HTTP status, code and message of a domain error."""
    match error:
        case RequestRejected():
            return Problem(error.status, error.message, error.code, field=error.field, retry_after=error.retry_after)
        case NotFound() | StateConflict():
            return Problem(404 if isinstance(error, NotFound) else 409, str(error), error.code, field=error.field)
        case AmbiguousId() | ValueRejected():
            code = "ambiguous_id" if isinstance(error, AmbiguousId) else "invalid_value"
            return Problem(400, str(error), code, field=error.field)
        case RecipeRejected():
            return Problem(400, f"{error}.", "invalid_recipe", field=error.field)
        case ContentUnreadable() | EncryptionKeyMissing():
            return Problem(409, f"This cannot be decrypted: {error}.", "content_unreadable")
        case EngineRejected():
            return _from_engine(error)
        case EngineUnavailable():
            return _no_engine(error)
        case EngineBroke():
            return Problem(502, f"The model server broke off: {error}. Send the request again.", "engine_broke")
        case EngineAnswerUnusable():
            return Problem(502, f"The model server's answer cannot be read: {error}.", "engine_answer_unusable")
        case StoreUnavailable():
            message = f"The database does not answer, and this request needs it. Try again in {STORE_RETRY_SECONDS} s."
            return Problem(503, message, "store_unavailable", retry_after=str(STORE_RETRY_SECONDS))
        case SignalFailed():
            message = f"Temporal does not answer, and this request needs it. Try again in {TEMPORAL_RETRY_SECONDS} s."
            return Problem(503, message, "temporal_unavailable", retry_after=str(TEMPORAL_RETRY_SECONDS))
        case _:
            return Problem(500, "Internal error in the gateway; its log has the details.", "internal_error")


def _no_engine(error: EngineUnavailable) -> Problem:
    if isinstance(error, EnginesBusy):
        message = (
            f"The model servers have as many chats as they may: {error.limit} choices at once on each for one gateway. "
            f"No place became free for this request within {error.seconds:.0f} s. Try again in {BUSY_RETRY_SECONDS} s; "
            "an operator sets the bound with `CLAWLOOP_ENGINE_CHATS`."
        )
        return Problem(429, message, "engines_busy", retry_after=str(BUSY_RETRY_SECONDS))
    message = f"No model server can answer now: {error}. Try again in {ENGINE_RETRY_SECONDS} s."
    return Problem(503, message, "engine_unavailable", retry_after=str(ENGINE_RETRY_SECONDS))


def _from_engine(error: EngineRejected) -> Problem:
    message = str(error.error.get("message"))
    if error.status in (503, 504):
        retry_after = error.retry_after or str(ENGINE_RETRY_SECONDS)
        message = f"The model server cannot answer now ({error.status}): {message}. Try again in {retry_after} s."
        return Problem(503, message, "engine_unavailable", retry_after=retry_after)
    if not 400 <= error.status < 500:
        # Send 502: 500 means a gateway bug, and a model server sends no redirections.
        message = f"The model server failed ({error.status}): {message.rstrip('.')}. Send the request again."
        return Problem(502, message, "engine_broke")
    code = error.error.get("code")
    too_long: tuple[int, int] | None = None
    if error.status == 400 and any(phrase in message for phrase in _CONTEXT_OVERFLOW):
        code = CONTEXT_OVERFLOW
        too_long = _lengths(message)
    if error.status == 400 and _NO_PARSER in message:
        message = (
            "This model's engine was started without a parser of tool calls, so it takes no `tools`. Leave them out, "
            "or have its operator start it with one (`clawloop up --tool-call-parser NAME`)."
        )
        return Problem(400, message, "unsupported_parameter", field="tools")
    field = error.error.get("param")
    kind = error.error.get("type")
    return Problem(
        error.status,
        message,
        code if isinstance(code, str | int) else None,
        field=field if isinstance(field, str) else None,
        kind=_TYPES.get(error.status) or (kind if isinstance(kind, str) else None),
        retry_after=error.retry_after,
        too_long=too_long,
    )


def _lengths(message: str) -> tuple[int, int] | None:
    """Tokens of the prompt, at least so many, and of the context."""
    for form in _TOO_LONG:
        if found := form.search(message):
            most, said = int(found["most"]), found.groupdict()
            tokens = int(said.get("tokens") or 0)
            if said.get("given"):
                tokens = math.ceil(int(said["given"]) / max(int(said["bound"]), 1) * most)
            return max(tokens, most + 1), most
    return None


def first_invalid_field(error: ValidationError) -> tuple[str, str]:
    """The first field at fault, dotted, and a sentence that says what it should be."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(part for part in map(str, first["loc"]) if not _UNION_MEMBER.match(part))
    return field, f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}."


def _answer(problem: Problem, request: Request) -> Response:
    return problem.response(request.url.path, anthropic="anthropic-version" in request.headers)


def _unsupported(path: str) -> Problem | None:
    """The answer for a route of OpenAI's or Anthropic's that Clawloop does not have; None for any other."""
    for beginning, what in _UNSUPPORTED.items():
        if path == beginning or path.startswith(f"{beginning}/"):
            message = f"{what}: not supported. Clawloop serves chats. GET /openapi.json lists what there is."
            return Problem(404, message, "not_supported")
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of this app's routes in the shape of its path."""

    async def domain_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClawloopError)
        return _answer(to_problem(error), request)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if (unsupported := _unsupported(request.url.path)) is not None and error.status_code in (404, 405):
            return _answer(unsupported, request)
        if error.status_code == 404 and request.url.path.startswith("/v1/v1/"):
            # Anthropic's clients and OpenClaw's add `/v1` themselves.
            base = str(request.base_url).rstrip("/")
            message = f"This address has /v1 twice: the client adds it to its base URL itself, which is then {base}."
            return _answer(Problem(404, message, "unknown_url"), request)
        if error.status_code == 404:
            message = f"There is nothing at {request.method} {request.url.path}; chat is at POST /v1/chat/completions."
            return _answer(Problem(404, message, "unknown_url"), request)
        if error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}."
            response = _answer(Problem(405, message, "method_not_allowed"), request)
            response.headers.update(error.headers or {})
            return response
        return _answer(Problem(error.status_code, str(error.detail), None), request)

    async def invalid_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return _answer(Problem(400, f"`{field}`: {first['msg']}.", "invalid_value", field=field), request)

    async def client_disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected_error(request: Request, error: Exception) -> Response:
        log.error("unexpected error", exc_info=error, extra={"path": request.url.path})
        return _answer(to_problem(ClawloopError()), request)

    app.add_exception_handler(ClawloopError, domain_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid_parameter)
    app.add_exception_handler(ClientDisconnect, client_disconnected)
    app.add_exception_handler(Exception, unexpected_error)
