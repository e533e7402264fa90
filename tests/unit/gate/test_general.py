"""The general questions: checkable, and no answer by accident."""

from __future__ import annotations

from collections import Counter

import pytest

from clawloop.core.gate.checks import is_right, pattern_problem
from clawloop.core.gate.general import MIN_KNOWN, general_questions, why_not_watched

BY_QUESTION = {str(each.content.messages[0]["content"]): each.content for each in general_questions()}


def test_there_are_120_questions_in_three_languages_that_do_not_hold_their_answers() -> None:
    languages = Counter(each.language for each in general_questions())
    assert languages == {"en": 83, "de": 20, "es": 20}
    for question, content in BY_QUESTION.items():
        assert content.regex is not None
        assert pattern_problem(content.regex) is None
        assert not is_right(content, question), question


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("What is 2 + 2?", "2 + 2 = 4.", True),
        ("What is 2 + 2?", "**Four**", True),
        ("What is 2 + 2?", "4.5", False),
        ("What is 2 + 2?", "1,4", False),
        ("What is 2 + 2?", "14", False),
        ("What is 20 divided by 4?", "20/4=5, so five", True),
        ("What gas do plants take in from the air?", "It is CO₂ that they need", True),
        ("What is the chemical formula for water?", "H₂O", True),
        ("What is the chemical symbol for gold?", "Autumn", False),
        ("Welche Farbe hat Schnee?", "Schnee ist WEISS.", True),
        ("Was ist die Hauptstadt von Italien?", "_Rom_", True),
        ("Was ist die Hauptstadt von Italien?", "Die Romanze", False),
        ("¿Cuál es lo contrario de grande?", "Pequeño", True),
    ],
)
def test_an_answer_is_right_if_it_has_the_word_or_number_as_a_whole(question: str, answer: str, right: bool) -> None:
    assert is_right(BY_QUESTION[question], answer) is right


def test_what_keeps_them_from_counting_is_told() -> None:
    assert why_not_watched(MIN_KNOWN) == ""
    assert why_not_watched(None) == "the base model has not answered the general questions yet"
    assert why_not_watched(0).startswith("the base model knows 0 of 123 general questions")
