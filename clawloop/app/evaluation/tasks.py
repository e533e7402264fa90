"""Homework tasks: a question and its right answer, from our own small set or a file in GSM8K's form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from clawloop.core.errors import SetupError

# GSM8K's answers end with the number after this sign.
_FINAL = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Task:
    """
    Args:
        answer: a number, as text without separators of thousands.
    """

    question: str
    answer: str


def own_tasks() -> list[Task]:
    """Sixty word problems of one to three steps."""
    return _parse(files("clawloop.app.evaluation").joinpath("tasks.jsonl").read_text(encoding="utf-8"), "the own tasks")


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file: JSON lines or one JSON list, each with `question` and `answer` or `ground_truth_answer`.

    Raises:
        SetupError: it cannot be read, or names the first entry that is no task.
    """
    try:
        return _parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error


def is_right(task: Task, text: str) -> bool:
    """True if the last number of a text is the task's answer."""
    numbers = _NUMBER.findall(text)
    return bool(numbers) and _value(numbers[-1]) == _value(task.answer)


def _parse(text: str, name: str) -> list[Task]:
    try:
        listed = json.loads(text) if text.lstrip().startswith("[") else None
        entries = (
            list(enumerate(listed, start=1))
            if isinstance(listed, list)
            # Not `splitlines`: a JSON text may hold what Unicode calls a line's end.
            else [(at, json.loads(line)) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
        )
    except json.JSONDecodeError as error:
        raise SetupError(f"{name}: not JSON: {error}") from error
    tasks = [_task(entry, f"{name}, entry {at}") for at, entry in entries]
    if not tasks:
        raise SetupError(f"{name} has no task")
    return tasks


def _task(entry: object, place: str) -> Task:
    fields = entry if isinstance(entry, dict) else {}
    question = fields.get("question")
    answer = fields.get("ground_truth_answer", fields.get("answer"))
    if not isinstance(question, str) or not question.strip():
        raise SetupError(f"{place}: needs `question`, a text")
    numbers = _NUMBER.findall(str(answer).rpartition(_FINAL)[2])
    if answer is None or not numbers:
        raise SetupError(f"{place}: needs `answer` or `ground_truth_answer`, which ends with a number")
    return Task(question.strip(), numbers[-1].replace(",", ""))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
