"""An agent of the environment `browser` without a model: it finds the elements of a task's solution in the newest
snapshot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from clawloop.core.errors import RecordUnusable
from clawloop.environments.browser.kinds import Step


def next_message(solution: Sequence[Step], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The agent's answer to these messages: the solution's next call, then `done`.

    Raises:
        RecordUnusable: the page does not show the element.
    """
    number = sum(message["role"] == "assistant" for message in messages)
    if number >= len(solution):
        return call("done", {})
    step = solution[number]
    return call(step.tool, {"ref": reference(step.on, _newest_text(messages)), **step.given})


def reference(element: str, snapshot: str) -> str:
    """The reference of an element, given by role and name, in a snapshot.

    Raises:
        RecordUnusable: it is not there.
    """
    found = re.search(rf"^ *- {re.escape(element)}(?: \[[^\]]*\])*? \[ref=(\w+)\]", snapshot, re.MULTILINE)
    if found is None:
        raise RecordUnusable(f"the page shows no {element}")
    return found[1]


def call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def _newest_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the newest message that holds any: pictures have messages of their own."""
    for message in reversed(messages):
        if isinstance(content := message["content"], str):
            return content
        for part in content or ():
            if part["type"] == "text":
                return str(part["text"])
    raise RecordUnusable("no message holds text")
