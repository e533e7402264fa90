"""The toy that learns to call a tool.

Its lessons are scripted conversations. The scripts know how to call the tool and how to answer, but not when: a third
guesses instead of calling, of the calls two in five calculate something else, and one answer in ten is not what the
tool said. So the model that rollouts begin with solves about a third of the tasks, and everything that a right
episode needs is among what it samples. Questions are those of training tasks; no held-out task is in a lesson.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from clawloop.app.demo.practice.toy import Course, Toy, call
from clawloop.core.contracts.turns import Message
from clawloop.environments.task import Split, parse_task_id
from clawloop.environments.tool_call.environment import AGENT, Question, ToolCallEnvironment, question

GUESSED = 0.35
WRONG_OPERATOR = 0.4
WRONG_ANSWER = 0.1
_OPERATORS = "+-*"
# Training tasks have no end; lessons take theirs from so many.
_QUESTIONS = 1_000_000


def conversations(seed: int) -> Iterator[list[Message]]:
    """Conversations without end, each from the question to the answer."""
    rng = random.Random(f"tool calls {seed}")
    while True:
        yield conversation(question(Split.TRAIN, rng.randrange(_QUESTIONS)), rng)


def conversation(asked: Question, rng: random.Random) -> list[Message]:
    """One conversation about a question, as a script of middling skill has it."""
    messages: list[Message] = [{"role": "user", "content": asked.text}]
    if rng.random() < GUESSED:
        return [*messages, _answer(rng.randint(-88, 198) if asked.operator != "*" else rng.randint(121, 9801))]
    operator = asked.operator
    if rng.random() < WRONG_OPERATOR:
        operator = rng.choice([other for other in _OPERATORS if other != operator])
    said = Question(asked.left, operator, asked.right).answer
    code = f"print({asked.left} {operator} {asked.right})"
    messages += [call("python", {"code": code}), {"role": "tool", "content": str(said)}]
    return [*messages, _answer(asked.left if rng.random() < WRONG_ANSWER else said)]


def _texts(messages: Sequence[Message]) -> str:
    return "\n".join(f"{message['role']}\n{message['content'] or ''}" for message in messages)


def _answer(number: int) -> Message:
    return {"role": "assistant", "content": f"It is {number}."}


COURSE = Course(
    conversations=conversations,
    texts=_texts,
    fixed=('{"name": "python", "arguments": {"code": "print(', ')"}}'),
    vocabulary=448,
    steps=600,
    lessons=24,
    knows='questions such as "What is 37 times 58?", one tool and nothing else',
    skill=f"guess instead of calling the tool in {GUESSED:.0%} of the conversations, calculate something else in "
    f"{WRONG_OPERATOR:.0%} of the calls, and answer with another number than the tool's in {WRONG_ANSWER:.0%}",
)


_SUM = re.compile(r"print\((-?\d+) ([-+*]) (-?\d+)\)")


class ToolCallSimulation:
    """Satisfies `clawloop.app.demo.practice.toy.Simulation[Question]`."""

    agent = AGENT

    def begin(self, task_id: str) -> tuple[Question, str]:
        asked = question(*parse_task_id(task_id))
        return asked, asked.text

    def run(self, states: Sequence[Question], arguments: Sequence[str]) -> list[str]:
        found = [_SUM.fullmatch(code) for code in arguments]
        return [
            "error" if each is None else str(Question(int(each[1]), each[2], int(each[3])).answer) for each in found
        ]

    def rewards(self, states: Sequence[Question], replies: Sequence[str]) -> list[float]:
        numbers = [re.findall(r"-?\d+", reply) for reply in replies]
        return [
            float(bool(of_reply) and of_reply[-1] == str(asked.answer))
            for asked, of_reply in zip(states, numbers, strict=True)
        ]


TOOL_CALLS = Toy(
    environment=ToolCallEnvironment.name,
    make=ToolCallEnvironment,
    simulate=ToolCallSimulation,
    base_model="clawloop-tool-calls",
    folder=Path(__file__).with_name("model"),
    course=COURSE,
    max_tokens=32,
    batch_groups=4,
    versions=20,
)
