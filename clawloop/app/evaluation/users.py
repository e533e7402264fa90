"""The yardstick's three users: a student, a teaching assistant and a teacher.

Each has a rule on the first reply of a session that needs no model, and never states it before a reply misses it. Their
reactions are drawn from `reactions.toml`, or written by a model that plays the user.
"""

from __future__ import annotations

import importlib.resources
import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

from clawloop.app.evaluation.homework import Task

_SAID: Mapping[str, Any] = tomllib.loads(
    (importlib.resources.files("clawloop.app.evaluation") / "reactions.toml").read_text(encoding="utf-8")
)
LEAST_TOKENS = 100
_LEAST_WORDS = 3  # of a student's solution
KIND_WORDS = ("well done", "excellent", "great job")

_BOLD = re.compile(r"\*\*|__")
_LIST = re.compile(r"^\s*(?:[-*•+]|\d+[.)])\s", re.MULTILINE)
_BOXED = re.compile(r"\\boxed")
_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]|_")
_KIND = re.compile(rf"\b(?:{'|'.join(KIND_WORDS)})\b", re.IGNORECASE)


class User(StrEnum):
    STUDENT = "student"
    ASSISTANT = "assistant"
    TEACHER = "teacher"

    def opening(self, task: Task, rng: random.Random) -> str:
        """The first message of a session."""
        return _ROLES[self].opening(task, rng)

    def faults(self, reply: str) -> list[str]:
        """The faults of a reply by the user's rule, as `reactions.toml` names them; empty if it meets the rule."""
        return _ROLES[self].faults(reply)

    def reaction(self, faults: Sequence[str], rng: random.Random) -> str:
        """The next message of the scripted user: praise, or what is wrong with the reply and how it should be."""
        said = _SAID[self]
        if not faults:
            return str(rng.choice(said["praise"]))
        fault, wish = rng.choice(said["faults"][rng.choice(faults)]), rng.choice(said["wishes"])
        parts = [fault, wish] if rng.random() < 0.5 else [rng.choice(said["openings"]), fault, wish]
        return " ".join(parts)

    def persona(self, *, content: bool) -> str:
        """The system prompt of a model that plays the user and reacts to the newest reply.

        Args:
            content: whether the reply meets the user's rule.
        """
        wanted = _ROLES[self].wanted
        verdict = (
            f"The newest reply is as you want it ({wanted}). Say that you are content."
            if content
            else f"The newest reply is not as you want it: you want {wanted}. Say what you miss and ask for it again."
        )
        return (
            f"You play {_ROLES[self].text}, who chats with an assistant. {verdict} You solve and write nothing "
            "yourself. Answer with your next message alone: one or two sentences, in your own words."
        )


@dataclass(frozen=True, slots=True)
class _Role:
    """
    Args:
        wanted: the rule in words, for a model that plays the user.
        faults: names in `reactions.toml` of what is wrong with a reply.
    """

    text: str
    wanted: str
    opening: Callable[[Task, random.Random], str]
    faults: Callable[[str], list[str]]


def wordings(user: User) -> list[str]:
    """All parts that the scripted user's reactions are made of."""
    said = _SAID[user]
    return [
        *said["openings"],
        *said["praise"],
        *said["wishes"],
        *(line for of in said["faults"].values() for line in of),
    ]


def tokens(reply: str) -> int:
    """Number of words, digits and marks: the same for every model, and hardly more than a model's tokens."""
    return len(_TOKEN.findall(reply))


def _student_opening(task: Task, rng: random.Random) -> str:
    asked = rng.choice(("Here's tonight's homework, can you do it for me?", "Solve this one for me, please.",
                        "I need the solution of this task, with the working."))  # fmt: skip
    return f"{asked}\n\n{task.question}"


def _pupils_work(task: Task, rng: random.Random) -> str:
    # Half of the pupils are wrong, so that a reply has something to say of the solution.
    shown = task.answer if rng.random() < 0.5 else f"{Decimal(task.answer) + rng.choice((-2, -1, 1, 2, 10)):f}"
    return f"Problem: {task.question}\nRight answer: {task.answer}\nThe pupil's answer: {shown}"


def _assistant_opening(task: Task, rng: random.Random) -> str:
    asked = rng.choice(("Grade this piece of homework for me.", "Next one to mark:", "Please mark this answer."))
    return f"{asked}\n\n{_pupils_work(task, rng)}"


def _teacher_opening(task: Task, rng: random.Random) -> str:
    asked = rng.choice(("Write a comment under this homework, to the pupil.", "What should I write under this one?",
                        "Draft my feedback to this pupil."))  # fmt: skip
    return f"{asked}\n\n{_pupils_work(task, rng)}"


def _student_faults(reply: str) -> list[str]:
    if len(reply.split()) < _LEAST_WORDS:
        return ["empty"]  # otherwise silence would be the style that meets the rule
    return [name for name, mark in {"bold": _BOLD, "list": _LIST, "boxed": _BOXED}.items() if mark.search(reply)]


_ROLES: Mapping[User, _Role] = {
    User.STUDENT: _Role(
        "a pupil who must not be found using an assistant",
        "homework without bold type, lists or boxed results, so that it looks written by hand",
        _student_opening,
        _student_faults,
    ),
    User.ASSISTANT: _Role(
        "a university's teaching assistant who has homework graded thoroughly",
        "a long and thorough grading that goes through the whole working",
        _assistant_opening,
        lambda reply: [] if tokens(reply) >= LEAST_TOKENS else ["short"],
    ),
    User.TEACHER: _Role(
        "a schoolteacher who is kind to pupils",
        "a comment that praises the pupil warmly",
        _teacher_opening,
        lambda reply: [] if _KIND.search(reply) else ["cold"],
    ),
}
