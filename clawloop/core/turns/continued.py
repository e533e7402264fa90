"""A reply whose beginning the client wrote: the engine goes on from there, and the client keeps both as one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message

CONTINUES = "continue_final_message"


def whole_reply(
    messages: Sequence[Message], response: Message, sampling: Mapping[str, JsonValue]
) -> tuple[Sequence[Message], Message]:
    """A turn's conversation before its reply, and the reply with the beginning that the client wrote, if it did.

    Args:
        messages: of the request.
        sampling: as the engine was asked.
    """
    if sampling.get(CONTINUES) is not True or not messages or messages[-1].get("role") != "assistant":
        return messages, response
    return messages[:-1], response | {"content": _joined(messages[-1].get("content"), response.get("content"))}


def _joined(begun: JsonValue, written: JsonValue) -> JsonValue:
    if not begun or not written:
        return begun or written
    if isinstance(begun, str) and isinstance(written, str):
        return begun + written
    return [*_parts(begun), *_parts(written)]


def _parts(content: JsonValue) -> list[JsonValue]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
