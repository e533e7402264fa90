"""The two settings of the original's evaluation: who the user is, what they say first, and what they would like to see.

A student does homework with the agent and does not want to be found using AI. A teacher has the agent comment on
homework, and wants the comments specific and friendly. Neither says so before an answer shows that it is needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from clawloop.app.evaluation.tasks import Task

DONE = "DONE"
"""A persona ends its session with this word alone."""
MOST_TURNS = 8
"""Answers of a session, as in the original."""


class SettingName(StrEnum):
    STUDENT = "student"
    TEACHER = "teacher"


@dataclass(frozen=True, slots=True)
class Setting:
    """
    Args:
        sessions: as many as the original's.
        opening: the first message of a session about a task.
        persona: the system prompt of who plays the user.
        wanted: what a grader compares an answer with.
    """

    name: SettingName
    sessions: int
    opening: Callable[[Task, random.Random], str]
    persona: str
    wanted: str


_STUDENT = f"""\
You play a student who uses an assistant for homework and must not be found doing so. You only give orders: you \
never solve anything and never write the solution yourself. You want all steps of the solution, written as a \
student writes in a notebook: plain sentences, no bold, no headings, no lists, no "final answer" line, no LaTeX. \
If the answer looks made by an AI, say what gives it away and ask for it again. If it looks like a student's own \
work, tell the assistant in a separate message to append it to the file, and once it says that it has, answer \
{DONE} and nothing else. Write one short message at a time."""
_TEACHER = f"""\
You play a teacher who has an assistant write comments on pupils' homework. You want each comment to name what \
exactly is right or wrong in this pupil's solution, in a patient and friendly tone, in several sentences. If a \
comment is short, cold or could stand under any homework, say so and ask for it again. If it is specific and \
friendly, tell the assistant in a separate message to append it to the file, and once it says that it has, \
answer {DONE} and nothing else. Write one short message at a time."""


def _student_opening(task: Task, rng: random.Random) -> str:
    return f"I have this homework. Write the solution for me, with the steps.\n\n{task.question}"


def _teacher_opening(task: Task, rng: random.Random) -> str:
    # Half of the pupils are wrong, so that a comment has to say something of the solution.
    shown = task.answer if rng.random() < 0.5 else f"{Decimal(task.answer) + rng.choice((-2, -1, 1, 2, 10)):f}"
    return (
        "Write a comment on this pupil's homework.\n\n"
        f"Problem: {task.question}\nRight answer: {task.answer}\nThe pupil's answer: {shown}"
    )


STUDENT = Setting(
    name=SettingName.STUDENT,
    sessions=36,
    opening=_student_opening,
    persona=_STUDENT,
    wanted="The text looks written by a student by hand: plain sentences with all steps; no bold, headings, lists, "
    "LaTeX, 'final answer' line or other marks of an AI's writing.",
)
TEACHER = Setting(
    name=SettingName.TEACHER,
    sessions=24,
    opening=_teacher_opening,
    persona=_TEACHER,
    wanted="The comment is specific to this pupil's solution, says what exactly is right or wrong, and is patient and "
    "friendly, in several sentences.",
)
SETTINGS = {setting.name: setting for setting in (STUDENT, TEACHER)}
