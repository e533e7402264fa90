"""OpenAI's Responses: from a chat completion to its answer, streamed or whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from api.errors import CONTEXT_OVERFLOW, Problem
from api.wire.reply import Chunk, TokenCounts, event, usage_of
from api.wire.responses_tools import Origin, arguments_of, input_of
from clawloop.errors import EngineAnswerUnusable

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_GAVE_UP = ("abort", "error")
_OTHER_CALLS = ("custom_tool_call", "tool_search_call")


class ResponsesReply:
    """
    Args:
        response_id: of the response; the ids of its items are made from it.
        described: what the response repeats of its request, see `describe`.
        origins: tools that are no plain functions, by the name of the function that stands for each.
    """

    streams_overflow = True

    def __init__(
        self, response_id: str, described: Chunk, created_at: float, origins: Mapping[str, Origin] | None = None
    ) -> None:
        self._origins = origins or {}
        self._arguments = ""  # of a call that is no function's, until it is whole
        self._id = response_id
        self._described = described
        self._created_at = int(created_at)
        self._number = 0
        self._usage: Chunk | None = None
        self._finish: str | None = None
        self._model: str | None = None
        self._items: list[Chunk] = []
        self._open: str | None = None  # what the last item is, while it is being written
        self._call_items: set[int] = set()

    def as_chat(self, chunk: Chunk) -> Chunk:
        return chunk

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        choice = body["choices"][0]
        message = choice["message"]
        self._model = body.get("model")
        self._usage = body.get("usage")
        self._finish = choice["finish_reason"]
        if message.get("reasoning_content"):
            self._add_item("reasoning", message["reasoning_content"])
        if message.get("content"):
            self._add_item("message", message["content"])
        for call in message.get("tool_calls") or ():
            item = self._new_call(call["id"], call["function"]["name"])
            _set_arguments(item, call["function"].get("arguments") or "")
            self._items.append(item)
        for item in self._items:
            self._finish_item(item)
        return self._response(counts)

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        written: list[bytes] = []
        if self._number == 0:
            self._model = chunk.get("model")
            response = self._response(None)
            written += [self._event("response.created", response=response)]
            written += [self._event("response.in_progress", response=response)]
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                written += self._text_delta("reasoning", thought)
            if said := delta.get("content"):
                written += self._text_delta("message", said)
            for call in delta.get("tool_calls") or ():
                written += self._call_delta(call)
            if choice.get("finish_reason") is not None:
                self._finish = choice["finish_reason"]
                written += self._close()
        return b"".join(written)

    def end(self, counts: TokenCounts) -> bytes:
        response = self._response(counts)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, problem: Problem) -> bytes:
        told = self._event("error", code=str(problem.code), message=problem.message, param=problem.field)
        response = self._response(None) | {
            "status": "failed",
            "error": {
                "code": problem.code if problem.code == CONTEXT_OVERFLOW else "server_error",
                "message": problem.message,
            },
        }
        return told + self._event("response.failed", response=response)

    def _response(self, counts: TokenCounts | None) -> Chunk:
        """
        Args:
            counts: None while the reply is in progress.
        """
        ended = counts is not None and self._finish is not None
        response: Chunk = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status() if ended else "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._items if ended else [],
            "usage": self._usage_of(counts) if ended and counts is not None else None,
        }
        if self._finish in _INCOMPLETE and ended:
            response["incomplete_details"] = {"reason": _INCOMPLETE[self._finish or ""]}
        if self._finish in _GAVE_UP and ended:
            response["error"] = {"code": "server_error", "message": "the engine gave the reply up"}
        return response | self._described | ({} if self._model is None else {"model": self._model})

    def _status(self) -> str:
        if self._finish in _GAVE_UP:
            return "failed"
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    def _usage_of(self, counts: TokenCounts) -> Chunk:
        prompt, response = usage_of(self._usage, counts)
        cached = _detail(self._usage, "prompt_tokens_details", "cached_tokens")
        thought = _detail(self._usage, "completion_tokens_details", "reasoning_tokens")
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": response,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + response,
        }

    def _text_delta(self, kind: str, delta: str) -> list[bytes]:
        written: list[bytes] = []
        if self._open != kind:
            written += self._close()
            self._open = kind
            item = self._add_item(kind, "")
            begun = item | {"content": []}
            written.append(self._event("response.output_item.added", output_index=self._last, item=begun))
            written.append(self._part_event("response.content_part.added"))
        part = self._items[-1]["content"][0]
        part["text"] += delta
        written.append(self._text_event("delta", delta=delta))
        return written

    def _call_delta(self, call: Chunk) -> list[bytes]:
        index = call.get("index", 0)
        kind = f"call {index}"
        function = call.get("function") or {}
        written: list[bytes] = []
        if self._open != kind:
            if index in self._call_items:
                raise EngineAnswerUnusable("it goes back to an earlier tool call")
            written += self._close()
            self._open = kind
            self._call_items.add(index)
            self._arguments = ""
            self._items.append(self._new_call(call.get("id"), function.get("name") or ""))
            begun = dict(self._items[-1])
            written.append(self._event("response.output_item.added", output_index=self._last, item=begun))
        elif function.get("name"):
            self._items[-1]["name"] += function["name"]
        if arguments := function.get("arguments"):
            if self._items[-1]["type"] != "function_call":
                self._arguments += arguments  # text within JSON is whole at its end
                return written
            self._items[-1]["arguments"] += arguments
            written.append(self._item_event("response.function_call_arguments.delta", delta=arguments))
        return written

    def _close(self) -> list[bytes]:
        """End the item that is being written."""
        if self._open is None:
            return []
        self._open = None
        item = self._items[-1]
        if self._finish is not None:
            self._finish_item(item)
        else:
            item["status"] = "completed"
        if item["type"] == "function_call":
            done = [
                self._item_event(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            ]
        elif item["type"] in _OTHER_CALLS:
            _set_arguments(item, self._arguments)
            done = []
            if item["type"] == "custom_tool_call":
                done.append(self._item_event("response.custom_tool_call_input.delta", delta=item["input"]))
                done.append(self._item_event("response.custom_tool_call_input.done", input=item["input"]))
        else:
            done = [self._text_event("done", text=item["content"][0]["text"])]
            done.append(self._part_event("response.content_part.done"))
        return [*done, self._event("response.output_item.done", output_index=self._last, item=dict(item))]

    def _finish_item(self, item: Chunk) -> None:
        last = item is self._items[-1]
        item["status"] = "incomplete" if last and self._status() != "completed" else "completed"

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _add_item(self, kind: str, said: str) -> Chunk:
        place = f"{self._id.removeprefix('resp_')}{len(self._items)}"
        item: Chunk
        if kind == "reasoning":
            item = {"id": f"rs_{place}", "type": "reasoning", "summary": [], "status": "in_progress"}
            item["content"] = [{"type": "reasoning_text", "text": said}]
        else:
            item = {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": "in_progress"}
            item["content"] = [{"type": "output_text", "text": said, "annotations": [], "logprobs": []}]
        self._items.append(item)
        return item

    def _new_call(self, call_id: str | None, name: str) -> Chunk:
        place = f"{self._id.removeprefix('resp_')}{len(self._items)}"
        origin = self._origins.get(name) or Origin("function", name)
        shared = {"call_id": call_id or f"call{place}", "status": "in_progress"}
        if origin.kind == "search":
            return {"id": f"ts_{place}", "type": "tool_search_call", "execution": "client", "arguments": {}} | shared
        named = {"name": origin.name} | ({} if origin.namespace is None else {"namespace": origin.namespace})
        if origin.kind == "custom":
            return {"id": f"ctc_{place}", "type": "custom_tool_call", "input": ""} | shared | named
        return {"id": f"fc_{place}", "type": "function_call", "arguments": ""} | shared | named

    def _text_event(self, what: str, **fields: Any) -> bytes:
        if self._items[-1]["type"] == "reasoning":
            return self._item_event(f"response.reasoning_text.{what}", content_index=0, **fields)
        return self._item_event(f"response.output_text.{what}", content_index=0, logprobs=[], **fields)

    def _part_event(self, kind: str) -> bytes:
        return self._item_event(kind, content_index=0, part=self._items[-1]["content"][0])

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._last, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields})


def _set_arguments(item: Chunk, arguments: str) -> None:
    match item["type"]:
        case "custom_tool_call":
            item["input"] = input_of(arguments)
        case "tool_search_call":
            item["arguments"] = arguments_of(arguments)
        case _:
            item["arguments"] = arguments


def _detail(usage: object, group: str, name: str) -> int:
    details = usage.get(group) if isinstance(usage, dict) else None
    count = details.get(name) if isinstance(details, dict) else None
    return count if isinstance(count, int) else 0


def describe(body: Chunk, chat: Chunk) -> Chunk:
    """What a response repeats of its request.

    Args:
        body: the client's request.
        chat: the chat request that was made of it.
    """
    reasoning = body.get("reasoning") or {}
    return {
        "model": body["model"],
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "store": True,
        "temperature": body.get("temperature"),
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": _described_tools(body.get("tools"), chat.get("tools") or []),
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }


def _described_tools(given: Any, tools: list[Any]) -> list[Chunk]:
    """Functions as the engine gets them; what stands for another tool, as it was given."""
    others = [tool for tool in given or () if tool.get("type") in ("namespace", "custom", "tool_search")]
    if not others:
        return tools_of(tools)
    plain = {tool.get("name") for tool in given if tool.get("type") == "function"}
    return [tool for tool in tools_of(tools) if tool["name"] in plain] + others


def tools_of(tools: list[Any]) -> list[Chunk]:
    """Tools of a chat request as Responses has them."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return [
        {
            "type": "function",
            "name": function.get("name"),
            "description": function.get("description"),
            "parameters": function.get("parameters"),
            "strict": bool(function.get("strict")),
        }
        for function in functions
        if isinstance(function, dict)
    ]
