"""Answers of `POST /v1/chat/completions`, for the OpenAPI description: the engine writes them, the gateway relays."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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
