"""Tasks are read in both of GSM8K's forms, and style is graded by a scale and by rules."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from clawloop.app.evaluation.graders import grade_by_rules, parse_grade
from clawloop.app.evaluation.settings import STUDENT, TEACHER
from clawloop.app.evaluation.statistics import change, estimate
from clawloop.app.evaluation.tasks import Task, is_right, own_tasks, read_tasks
from clawloop.core.errors import SetupError


def test_the_own_tasks_are_different_and_have_whole_answers() -> None:
    tasks = own_tasks()
    assert len({task.question for task in tasks}) == len(tasks) == 60
    assert all(float(task.answer).is_integer() for task in tasks)


def test_both_forms_of_gsm8k_are_read(tmp_path: Path) -> None:
    lines, whole = tmp_path / "lines.jsonl", tmp_path / "whole.json"
    lines.write_text(json.dumps({"question": "How many?", "answer": "3 * 400 = 1,200\n#### 1,200"}) + "\n\n")
    whole.write_text(json.dumps([{"question": "How many?", "ground_truth_answer": "1200"}]))
    assert read_tasks(lines) == read_tasks(whole) == [Task("How many?", "1200")]


def test_a_task_may_hold_what_unicode_calls_a_line_end_and_a_file_a_mark_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "one\u2028two", "answer": "1"}\r\n', encoding="utf-8-sig")
    assert read_tasks(path) == [Task("one\u2028two", "1")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no task"),
        ("{", "not JSON"),
        ('{"question": "a", "answer": "1"}\n{"answer": "1"}', "entry 2: needs `question`"),
        ('{"question": "a", "answer": "none"}', "entry 1: needs `answer`"),
        ("[1]", "entry 1: needs `question`"),
    ],
)
def test_a_file_without_tasks_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(SetupError, match=why):
        read_tasks(path)


@pytest.mark.parametrize(
    ("text", "right"),
    [("So it is 1,200.", True), ("It is 1200.0 in all", True), ("1200, or 7", False), ("many", False)],
)
def test_the_last_number_is_the_answer(text: str, right: bool) -> None:
    assert is_right(Task("How many?", "1200"), text) is right


@pytest.mark.parametrize(
    ("answer", "grade"),
    [("fine\nscore: 0.75", 0.75), ("**Score: 0.8**", 0.75), ("score: 1.", 1.0), ("0.5", None), ("score: 7", None)],
)
def test_grades_are_on_the_originals_scale(answer: str, grade: float | None) -> None:
    assert parse_grade(answer) == grade


def test_rules_see_an_ais_marks_and_a_friendly_specific_comment() -> None:
    plain = "First I multiplied 3 by 4, which is 12. Then I took away 2 and had 10."
    assert grade_by_rules(STUDENT, plain) == 1.0
    assert grade_by_rules(STUDENT, f"## Solution\n\n1. **Multiply**\n\nFinal answer: {plain}") == 0.0
    assert grade_by_rules(STUDENT, " ") == 0.0
    kind = "Well done with the first step, 3 times 4 is 12! Notice that you then added 2. Take it away. Keep it up."
    assert grade_by_rules(TEACHER, kind) == 1.0
    assert grade_by_rules(TEACHER, "Wrong.") < 0.5


@pytest.mark.parametrize("answer", ["7", "2.5", "12345678"])
def test_half_of_a_teachers_pupils_are_wrong_by_a_little(answer: str) -> None:
    shown = []
    for seed in range(200):
        opening = TEACHER.opening(Task("How many?", answer), random.Random(seed))
        shown.append(opening.rpartition("The pupil's answer: ")[2])
    wrong = [number for number in shown if number != answer]
    assert 60 < len(wrong) < 140
    assert all(0 < abs(float(number) - float(answer)) <= 10 for number in wrong)


def test_intervals_hold_the_mean_and_changes_are_paired() -> None:
    found = estimate([0.0, 0.5, None, 1.0])
    assert (found.count, found.mean) == (3, 0.5)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= 0.5 <= found.high <= 1
    assert estimate([None]).mean is None
    moved = change([0.0, 0.25, None], [0.5, 0.75, 1.0])
    assert (moved.mean, moved.low, moved.high, moved.count) == (0.5, 0.5, 0.5, 2)
