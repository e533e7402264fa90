"""Anthropic's Messages: from a chat completion to its answer, streamed or whole."""

from __future__ import annotations

from typing import Any

import orjson

from api.errors import Problem
from api.wire.reply import Chunk, TokenCounts, event, require_ended, usage_of
from clawloop.errors import EngineAnswerUnusable

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class MessagesReply:
    """
    Args:
        message_id: of the message.
        model: the name that the client asked for, where the engine gives none.
    """

    streams_overflow = False

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._started = False
        self._usage: Chunk | None = None
        self._finish: str | None = None
        self._stop: object = None
        self._blocks = 0
        self._open: str | None = None  # what the block that is being written holds
        self._calls: dict[int, Chunk] = {}  # by index: what is known of calls whose name has not come yet
        self._begun: set[int] = set()

    def as_chat(self, chunk: Chunk) -> Chunk:
        return chunk

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        choice = body["choices"][0]
        self._take_end(choice)
        message = choice["message"]
        content: list[Chunk] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        content += [_tool_use(call) for call in message.get("tool_calls") or ()]
        prompt, response = usage_of(body.get("usage"), counts)
        return self._message(body, prompt, response, content) | {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
        }

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        written: list[bytes] = []
        if not self._started:
            self._started = True
            message = self._message(chunk, counts.prompt or 0, 0, [])
            written.append(event({"type": "message_start", "message": message}))
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                written += self._text_delta("thinking", "thinking_delta", thought)
            if said := delta.get("content"):
                written += self._text_delta("text", "text_delta", said)
            for call in delta.get("tool_calls") or ():
                written += self._call_delta(call)
            if choice.get("finish_reason") is not None:
                self._take_end(choice)
                written += self._close()
        return b"".join(written)

    def end(self, counts: TokenCounts) -> bytes:
        prompt, response = usage_of(self._usage, counts)
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        usage = {"input_tokens": prompt, "output_tokens": response}
        return event({"type": "message_delta", "delta": delta, "usage": usage}) + event({"type": "message_stop"})

    def failure(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + problem.anthropic() + b"\n\n"

    def _message(self, chunk: Chunk, prompt: int, response: int, content: list[Chunk]) -> Chunk:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model") or self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt, "output_tokens": response},
        }

    def _take_end(self, choice: Chunk) -> None:
        self._finish = choice["finish_reason"]
        self._stop = choice.get("stop_reason")
        require_ended(self._finish)

    def _stop_reason(self) -> str:
        if self._finish == "stop" and self._stop_sequence() is not None:
            return "stop_sequence"
        return _STOP_REASONS.get(self._finish or "", "end_turn")

    def _stop_sequence(self) -> str | None:
        return self._stop if isinstance(self._stop, str) else None

    def _text_delta(self, kind: str, delta: str, said: str) -> list[bytes]:
        written = self._begin(kind, {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        return [*written, self._delta({"type": delta, kind: said})]

    def _call_delta(self, call: Chunk) -> list[bytes]:
        index = call.get("index", 0)
        kind = f"call {index}"
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if self._open == kind:
            return [self._delta({"type": "input_json_delta", "partial_json": arguments})] if arguments else []
        if index in self._begun:
            raise EngineAnswerUnusable("it goes back to an earlier tool call")
        known = self._calls.setdefault(index, {"id": None, "name": "", "arguments": ""})
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += arguments
        if not known["name"]:
            return []
        self._begun.add(index)
        call_id = known["id"] or f"toolu_{self._id.removeprefix('msg_')}{index}"
        block = {"type": "tool_use", "id": call_id, "name": known["name"], "input": {}}
        written = self._begin(kind, block)
        if known["arguments"]:
            written.append(self._delta({"type": "input_json_delta", "partial_json": known["arguments"]}))
        return written

    def _begin(self, kind: str, block: Chunk) -> list[bytes]:
        """Open a block of this kind, unless one is open."""
        if self._open == kind:
            return []
        written = self._close()
        self._open = kind
        self._blocks += 1
        return [*written, event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})]

    def _delta(self, delta: Chunk) -> bytes:
        return event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [event({"type": "content_block_stop", "index": self._blocks - 1})]


def _tool_use(call: Chunk) -> Chunk:
    arguments: str = call["function"].get("arguments") or "{}"
    try:
        given: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):  # the wire format has objects only; a client sends this back as it is
        given = {"raw_arguments": arguments}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
