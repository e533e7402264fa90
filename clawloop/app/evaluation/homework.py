"""Homework: a question and its right answer, from our own small set or a file in GSM8K's form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

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


def own_homework() -> list[Task]:
    """Sixty word problems of one to three steps."""
    return _parse(
        files("clawloop.app.evaluation").joinpath("homework.jsonl").read_text(encoding="utf-8"), "our homework"
    )


def read_homework(path: Path) -> list[Task]:
    """The homework of a file: JSON lines or one JSON list, each with `question` and `answer` or `ground_truth_answer`.

    Raises:
        SetupError: it cannot be read, has nothing, or names the first line that is no homework.
    """
    try:
        return _parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error


def _parse(text: str, name: str) -> list[Task]:
    if text.lstrip().startswith("["):
        listed = _json(text, name)
        entries = [(f"{name}, entry {at}", entry) for at, entry in enumerate(listed, start=1)]
    else:
        # Not `splitlines`: a JSON text may hold what Unicode calls a line's end.
        places = ((f"{name}, line {at}", line) for at, line in enumerate(text.split("\n"), start=1))
        entries = [(place, _json(line, place)) for place, line in places if line.strip()]
    if not entries:
        raise SetupError(f"{name} has no homework: write one JSON object with `question` and `answer` a line")
    return [_task(entry, place) for place, entry in entries]


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SetupError(
            f"{place}: not JSON ({error.msg}); a line is one object with `question` and `answer`"
        ) from error


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
