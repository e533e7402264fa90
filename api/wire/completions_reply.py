"""OpenAI's plain completions: relayed as vLLM has them, and read as a chat completion for capture."""

from __future__ import annotations

from typing import Any

import orjson

from api.errors import Problem
from api.wire.reply import Chunk, TokenCounts


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
