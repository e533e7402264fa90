"""Schemas of chat requests and their answers, for the OpenAPI description."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from api.errors import first_invalid_field
from api.json_bounds import Objects
from clawloop.core.errors import RequestRejected

# Requests -------------------------------------------------------------------------------------------------------------
# Schema of a chat request.
#
# Only fields that the gateway itself reads are checked here, strictly. All others go to the engine unchanged, which
# checks them: vLLM has many fields of its own.

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


@with_config(ConfigDict(extra="allow", strict=True))
class ChatMessage(TypedDict):
    """One message; content is text, a list of parts, or null beside tool calls."""

    role: Role


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The fields of `POST /v1/chat/completions` that the gateway reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=256, examples=["policy"])]
    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
    ]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's own upper bound.
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    include_reasoning: bool | None = None
    tools: Objects | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    metadata: dict[str, Any] | None = None
    session_id: Annotated[str, Field(max_length=1024)] | None = None
    turn_type: Annotated[str, Field(max_length=64)] | None = None
    session_done: bool | str | int | None = None


# Common misspellings of required fields; any other unknown field is left to the engine.
_MISSPELLED = {"message": "messages", "streaming": "stream", "max_token": "max_tokens", "tool": "tools"}


def parse_chat_request(body: dict[str, Any]) -> ChatRequest:
    """
    Raises:
        RequestRejected: names the first field at fault and what it should be.
    """
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        field, message = first_invalid_field(error)
        if error.errors(include_url=False, include_context=False)[0]["type"] != "missing":
            raise RequestRejected(message, code="invalid_value", field=field) from None
        close = [name for name in body if _MISSPELLED.get(name) == field] or get_close_matches(field, body, 1, 0.8)
        hint = f" Did you mean `{field}` by `{close[0]}`?" if close else ""
        raise RequestRejected(f"{message}{hint}", code="missing_required_parameter", field=field) from None


# Answers --------------------------------------------------------------------------------------------------------------
# Answers of `POST /v1/chat/completions`, for the OpenAPI description: the engine writes them, the gateway relays.


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class AssistantMessage(_Answer):
    """
    Args:
        reasoning_content: the thinking of a model that thinks.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class MessageDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Choice(_Answer):
    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChunkChoice(_Answer):
    index: int
    delta: MessageDelta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Usage(_Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class ChatCompletion(_Answer):
    """
    Args:
        id: `chatcmpl-…`, by which feedback and the admin routes name the reply.
        model: the version that answered.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ChatCompletionChunk(_Answer):
    """One event of a stream; an event with `error` instead of `choices` ends a stream that failed.

    Args:
        id: of the whole reply.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
