"""Titles of sessions, and messages as one text, for people."""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.canonical import is_volatile, text_parts
from clawloop.core.turns.files import for_people

_TITLE_LENGTH = 80


def title_of(messages: Sequence[Message]) -> str | None:
    """The beginning of what the user said first; None if the user said nothing in words."""
    for message in messages:
        if message.get("role") == "user" and not is_volatile(message):
            words = " ".join(" ".join(text_parts(message)).split())
            if words:
                return shortened(words, _TITLE_LENGTH)
    return None


def shortened(text: str, length: int) -> str:
    """The text, or its beginning with an ellipsis if it has more than `length` characters."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def plain_text(message: Message) -> str:
    """A message's text, with tool calls as `name(arguments)` and other parts by their kind."""
    lines = ["".join(text_parts(message))]
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind is not None and kind not in ("text", "input_text", "output_text"):
            lines.append(f"[{for_people(part) or kind}]")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            lines.append(f"{function.get('name')}({function.get('arguments') or ''})")
    return "\n".join(line for line in lines if line)
