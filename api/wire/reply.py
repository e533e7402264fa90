"""What writes one reply in a client's wire format, and the plain one: chat completions."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import orjson

from api.errors import Problem
from clawloop.errors import EngineAnswerUnusable

# vLLM's chat completion, or one chunk of it.
Chunk = dict[str, Any]


class TokenCounts(NamedTuple):
    """Tokens so far; None if the engine did not say."""

    prompt: int | None
    response: int | None


class ReplyFormat(Protocol):
    """Writes one reply. Holds the state of one stream: a retry takes a new one.

    Attributes:
        streams_overflow: a prompt that is too long is told in a stream, if one was asked for, as its clients read it
            there alone.
    """

    streams_overflow: bool

    def as_chat(self, chunk: Chunk) -> Chunk:
        """The engine's answer as a chat completion, for capture."""

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        """The body of an answer that is not streamed."""

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        """The events for one chunk; may be empty."""

    def end(self, counts: TokenCounts) -> bytes:
        """The events after the last chunk."""

    def failure(self, problem: Problem) -> bytes:
        """The events that tell a client whose stream has begun that it failed."""


class ChatReply:
    """OpenAI's chat completions, as vLLM has them."""

    streams_overflow = False

    def __init__(self, response_id: str) -> None:
        self._id = response_id

    def as_chat(self, chunk: Chunk) -> Chunk:
        return chunk

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        body["id"] = self._id
        return body

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        chunk["id"] = self._id
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def end(self, counts: TokenCounts) -> bytes:
        return b"data: [DONE]\n\n"

    def failure(self, problem: Problem) -> bytes:
        # Without [DONE] no client takes this for a complete answer.
        return b"data: " + problem.openai() + b"\n\n"


def event(data: Chunk) -> bytes:
    """A server-sent event named by its type, as Anthropic's and OpenAI's newer streams have it."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def usage_of(usage: object, counts: TokenCounts) -> tuple[int, int]:
    """Tokens of the prompt and of the reply: the engine's figures, else what was captured."""
    given = usage if isinstance(usage, dict) else {}
    prompt, response = given.get("prompt_tokens"), given.get("completion_tokens")
    return (
        prompt if isinstance(prompt, int) else counts.prompt or 0,
        response if isinstance(response, int) else counts.response or 0,
    )


def require_ended(finish: str | None) -> None:
    """
    Raises:
        EngineAnswerUnusable: the engine gave the reply up, which this wire format has no word for.
    """
    if finish in ("abort", "error"):
        raise EngineAnswerUnusable(f"the engine gave the reply up ({finish})")
