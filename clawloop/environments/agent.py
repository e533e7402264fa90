"""The agent that plays where an environment brings none: a loop around one tool, in the sandbox."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HARNESS = ("python3", "-I", "/task/harness.py")


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """
    Args:
        tool: as OpenAI's API describes tools.
        argument: of the tool; its value is the last argument of `program`.
        seconds: a call is stopped after this.
        turns: the episode is truncated after so many replies.
        max_tokens: of a reply.
        folder: in which the program runs.
        answer: file for the last reply; None: only what is left in /work counts.
    """

    tool: dict[str, Any]
    argument: str
    program: Sequence[str]
    folder: str
    turns: int
    seconds: float
    max_tokens: int
    answer: str | None

    def files(self, prompt: str) -> dict[str, bytes]:
        """What `HARNESS` finds below /task."""
        program = importlib.resources.files("clawloop.environments") / "inside" / "harness.py"
        return {
            "prompt.txt": prompt.encode(),
            "harness.py": program.read_bytes(),
            "harness.json": json.dumps(asdict(self)).encode(),
        }
