"""The environment `tool-call`: arithmetic, a Python tool in the sandbox, exact answers (the setting of ReTool, arXiv
2504.11536)."""

from __future__ import annotations

import importlib.resources
import random
from dataclasses import dataclass

from clawloop.environments.agent import HARNESS, AgentLoop
from clawloop.environments.task import EnvironmentTask, Split, parse_task_id, split_of

AGENT = AgentLoop(
    tool={
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run Python code; returns what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    },
    argument="code",
    program=("python3", "-I", "-c"),
    folder="/tmp",
    turns=6,
    seconds=10.0,
    max_tokens=512,
    answer="/work/answer.txt",
)
_VERIFIER = importlib.resources.files("clawloop.environments.tool_call") / "inside" / "verify.py"
_WORDS = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True, slots=True)
class Question:
    left: int
    operator: str
    right: int

    @property
    def text(self) -> str:
        return f"What is {self.left} {_WORDS[self.operator]} {self.right}?"

    @property
    def answer(self) -> int:
        return {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[self.operator](self.left, self.right)


class ToolCallEnvironment:
    """Satisfies `clawloop.environments.task.Environment`."""

    name = "tool-call"

    def task(self, task_id: str) -> EnvironmentTask:
        split, number = parse_task_id(task_id)
        asked = question(split, number)
        return EnvironmentTask(
            id=task_id,
            files=AGENT.files(asked.text),
            harness=HARNESS,
            tests={"answer.txt": str(asked.answer).encode(), "verify.py": _VERIFIER.read_bytes()},
            verifier=("python3", "-I", "/task/verify.py"),
            # Six turns and what they run take a minute; the rest is for an engine that restarts meanwhile.
            seconds=600.0,
        )


def question(split: Split, number: int) -> Question:
    """The `number`-th question of a split."""
    drawn = random.Random(f"{split}-{number}")
    while True:
        left, right, operator = drawn.randint(11, 99), drawn.randint(11, 99), drawn.choice("+-*")
        asked = Question(left, operator, right)
        if split_of(asked.text) is split:
            return asked
