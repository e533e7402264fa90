"""The environment `tool-call`: arithmetic, a Python tool in the sandbox, exact answers (the setting of ReTool, arXiv
2504.11536)."""

from __future__ import annotations

import importlib.resources
import random
from dataclasses import dataclass

from clawloop.core.episodes.kinds import KINDS, ChosenKind
from clawloop.environments.task import HARNESS, AgentLoop, EnvironmentTask, Split, parse_chosen_task_id, split_of

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
_OPERATORS = {word: operator for operator, word in _WORDS.items()}
_FIRST_LEVEL = KINDS["tool-call"]["plus"].first


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
        asked = question(*parse_chosen_task_id(self.name, task_id))
        return EnvironmentTask(
            id=task_id,
            files=AGENT.files(asked.text),
            harness=HARNESS,
            tests={"answer.txt": str(asked.answer).encode(), "verify.py": _VERIFIER.read_bytes()},
            verifier=("python3", "-I", "/task/verify.py"),
            # Six turns and what they run take a minute; the rest is for an engine that restarts meanwhile.
            seconds=600.0,
        )


def question(split: Split, number: int, chosen: ChosenKind | None = None) -> Question:
    """The `number`-th question of a split; a level is the number of digits of both numbers."""
    drawn = random.Random(f"{split}-{number}")
    digits = _FIRST_LEVEL if chosen is None else chosen.level
    least, most = (2, 9) if digits == 1 else (10 ** (digits - 1) + 1, 10**digits - 1)
    operators = "+-*" if chosen is None else _OPERATORS[chosen.kind]
    while True:
        left, right, operator = drawn.randint(least, most), drawn.randint(least, most), drawn.choice(operators)
        asked = Question(left, operator, right)
        if split_of(asked.text) is split:
            return asked
