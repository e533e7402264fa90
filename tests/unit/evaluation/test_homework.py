"""Homework is read in both of GSM8K's forms; a bad line is named with its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawloop.app.evaluation.homework import Task, own_homework, read_homework
from clawloop.core.errors import SetupError


def test_our_homework_is_different_and_has_whole_answers() -> None:
    tasks = own_homework()
    assert len({task.question for task in tasks}) == len(tasks) == 60
    assert all(float(task.answer).is_integer() for task in tasks)


def test_both_forms_of_gsm8k_are_read(tmp_path: Path) -> None:
    lines, whole = tmp_path / "lines.jsonl", tmp_path / "whole.json"
    lines.write_text(json.dumps({"question": "How many?", "answer": "3 * 400 = 1,200\n#### 1,200"}) + "\n\n")
    whole.write_text(json.dumps([{"question": "How many?", "ground_truth_answer": "1200"}]))
    assert read_homework(lines) == read_homework(whole) == [Task("How many?", "1200")]


def test_a_task_may_hold_what_unicode_calls_a_line_end_and_a_file_a_mark_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "homework.jsonl"
    path.write_text('{"question": "one\u2028two", "answer": "1"}\r\n', encoding="utf-8-sig")
    assert read_homework(path) == [Task("one\u2028two", "1")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no homework: write one JSON object"),
        ("{", "line 1: not JSON"),
        ('{"question": "a", "answer": "1"}\n\n{"question', "line 3: not JSON"),
        ('{"question": "a", "answer": "1"}\n{"answer": "1"}', "line 2: needs `question`"),
        ('{"question": "a", "answer": "none"}', "line 1: needs `answer`"),
        ("[1]", "entry 1: needs `question`"),
    ],
)
def test_a_file_without_homework_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "homework.jsonl"
    path.write_text(text)
    with pytest.raises(SetupError, match=why):
        read_homework(path)
