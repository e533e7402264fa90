"""Replies in a client's wire format; here those of chat completions and of plain completions."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import orjson

from api.errors import Problem
from clawloop.core.errors import EngineAnswerUnusable

# Replies --------------------------------------------------------------------------------------------------------------
# What writes one reply in a client's wire format, and the plain one: chat completions.

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


# Plain completions ----------------------------------------------------------------------------------------------------
# OpenAI's plain completions: relayed as vLLM has them, and read as a chat completion for capture.


class CompletionReply:
    """
    Args:
        completion_id: of the completion.
        keep_logprobs: the client asked for log-probs.
        keep_ids: the client asked for token ids.
    """

    streams_overflow = False

    def __init__(self, completion_id: str, *, keep_logprobs: bool, keep_ids: bool) -> None:
        self._id = completion_id
        self._keep_logprobs = keep_logprobs
        self._keep_ids = keep_ids

    def as_chat(self, chunk: Chunk) -> Chunk:
        choices = [_as_chat(choice) for choice in chunk["choices"]]
        prompt = next((choice.get("prompt_token_ids") for choice in chunk["choices"]), None)
        return {"choices": choices, "prompt_token_ids": prompt}

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        self._strip(body)
        return body

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        self._strip(chunk)
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def end(self, counts: TokenCounts) -> bytes:
        return b"data: [DONE]\n\n"

    def failure(self, problem: Problem) -> bytes:
        return b"data: " + problem.openai() + b"\n\n"

    def _strip(self, chunk: Chunk) -> None:
        """Remove what the gateway asked for and the client did not."""
        chunk["id"] = self._id
        for choice in chunk["choices"]:
            if not self._keep_logprobs:
                choice["logprobs"] = None
            if not self._keep_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)


def _as_chat(choice: Chunk) -> Chunk:
    said = {"role": "assistant", "content": choice["text"]}
    logprobs = choice.get("logprobs")
    values: list[Any] | None = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    return {
        "index": choice["index"],
        "delta": said,
        "message": dict(said),
        "logprobs": None if values is None else {"content": [{"logprob": value} for value in values]},
        "token_ids": choice.get("token_ids"),
        "finish_reason": choice.get("finish_reason"),
    }
