"""What scripted engines answer, as the parts in which vLLM streams it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Deltas = list[tuple[dict[str, Any], list[int]]]
"""Each part of a reply with the tokens it is made of."""


@dataclass(frozen=True, slots=True)
class Reply:
    """
    Args:
        calls: names and arguments of the tools it calls.
        prompt_tokens: how long the prompt is said to be; None: as long as its ids.
        has_ids: its tokens' ids and log-probs are sent.
        refused: the request is refused with these words.
    """

    text: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    prompt_tokens: int | None = None
    has_ids: bool = True
    refused: str | None = None

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else "stop"

    def deltas(self, number: int) -> Deltas:
        """A word a token, a call in three.

        Args:
            number: of the request, so that the ids of calls differ.
        """
        parts: list[dict[str, Any]] = []
        for position, word in enumerate(self.text.split(" ") if self.text else []):
            parts.append({"content": f" {word}" if position else word})
        for index, call in enumerate(self._calls(number)):
            arguments = call["function"]["arguments"]
            begun = call | {"index": index, "function": call["function"] | {"arguments": ""}}
            parts.append({"tool_calls": [begun]})
            for piece in (arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]):
                parts.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        return [*((part, [10 + position]) for position, part in enumerate(parts)), ({}, [2])]

    def message(self, number: int) -> dict[str, Any]:
        """The same in one piece."""
        return {"role": "assistant", "content": self.text or None, "refusal": None, "tool_calls": self._calls(number)}

    def _calls(self, number: int) -> list[dict[str, Any]]:
        return [
            {
                "id": f"chatcmpl-tool-{number:x}{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(self.calls)
        ]
