"""Who plays: our own loop around tools, or a command that is brought along; both in the sandbox."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clawloop.errors import SetupError

AGENT_FOLDER = "/agent"
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
        return _files(prompt, {**asdict(self), "tools": [self.tool]})


@dataclass(frozen=True, slots=True)
class SessionLoop:
    """The loop around a program that runs during the whole episode and answers the calls of several tools.

    Args:
        tools: as OpenAI's API describes them.
        session: the program. It writes one line at its start and one for each line it reads, which is a call: JSON
            objects, with `text`, and if need be with `picture`, a PNG in base64, or `ended`.
        turns, max_tokens: as of `AgentLoop`.
    """

    tools: Sequence[dict[str, Any]]
    session: Sequence[str]
    turns: int
    max_tokens: int

    def files(self, prompt: str) -> dict[str, bytes]:
        """What `HARNESS` finds below /task."""
        return _files(prompt, {**asdict(self), "answer": None})


@dataclass(frozen=True, slots=True)
class CommandHarness:
    """An agent that is brought along.

    Args:
        command: for bash, in /work; the task is in /task/prompt.txt.
        folder: of this machine, with what the command needs; read-only at `AGENT_FOLDER` in the sandbox.
    """

    command: str
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise SetupError(f"--harness-folder {self.folder} is no folder")

    @property
    def folders(self) -> dict[str, Path]:
        return {} if self.folder is None else {AGENT_FOLDER: self.folder.resolve()}


def _files(prompt: str, config: Mapping[str, Any]) -> dict[str, bytes]:
    program = importlib.resources.files("clawloop.environments") / "inside" / "harness.py"
    return {
        "prompt.txt": prompt.encode(),
        "harness.py": program.read_bytes(),
        "harness.json": json.dumps(config).encode(),
    }
