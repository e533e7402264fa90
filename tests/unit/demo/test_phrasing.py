"""Feedback: held-out phrases never occur in training data."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from clawloop.app.demo.examples import Lessons
from clawloop.app.demo.phrasing import (
    MEASURED_PHRASES,
    Feedback,
    Mood,
    Typist,
    handwritten_phrases,
    held_out_phrases,
    is_held_out,
    normal,
)
from clawloop.app.demo.world import Style

TRAINED = 3000  # phrases of each kind


def trained(mood: Mood, style: Style | None, count: int = TRAINED) -> list[str]:
    typist = Typist(random.Random(f"{mood} {style}"))
    return [typist.feedback(mood, style).text for _ in range(count)]


@pytest.fixture(scope="module")
def trained_forms() -> set[str]:
    kinds = [(mood, None) for mood in Mood if mood is not Mood.WISHED] + [(Mood.WISHED, style) for style in Style]
    return {normal(text) for mood, style in kinds for text in trained(mood, style)}


@pytest.mark.parametrize("held_out", ["phrase", "pattern"])
def test_measured_phrases_are_never_trained_on(held_out: str, trained_forms: set[str]) -> None:
    measured = held_out_phrases(held_out, MEASURED_PHRASES)
    assert len({normal(feedback.text) for feedback in measured}) == MEASURED_PHRASES
    assert [f.text for f in measured if normal(f.text) in trained_forms] == []
    assert [f.text for f in measured if not is_held_out(f.text)] == []


def test_handwritten_phrases_are_never_trained_on(trained_forms: set[str]) -> None:
    written = [phrase.text for phrase in handwritten_phrases()]
    assert len(written) >= 200
    assert [text for text in written if normal(text) in trained_forms] == []


def test_lessons_hold_no_phrase_that_is_held_out() -> None:
    """Lessons draw all feedback from a typist; any other source would show handwritten phrases here."""
    forms = {normal(phrase.text) for phrase in handwritten_phrases() if len(normal(phrase.text)) > 12}
    lessons = [lesson for together in islice(Lessons(0), 3000) for lesson in together]
    lines = {
        normal(line)
        for lesson in lessons
        for message in lesson.messages
        for line in str(message["content"]).split("\n")
    }
    assert forms & lines == set()


def test_phrasings_are_thousands() -> None:
    for mood in (Mood.LIKED, Mood.DISLIKED):
        assert len({normal(text) for text in trained(mood, None)}) > 1000
    assert len({normal(text) for text in trained(Mood.WISHED, Style.FORMAL)}) > 1000


def test_the_same_seed_types_the_same() -> None:
    assert trained(Mood.LIKED, None, 50) == trained(Mood.LIKED, None, 50)


def test_the_normal_form_ignores_case_punctuation_and_space() -> None:
    assert normal("Thank  you!!") == normal("thank you") == normal("THANK YOU...")
    assert normal("👍") == "👍"
    assert normal("...") == "..."


def test_votes() -> None:
    assert Feedback("a", Mood.LIKED).vote == 1
    assert Feedback("a", Mood.UNREADABLE).vote == 0
    assert Feedback("a", Mood.DISLIKED).vote == Feedback("a", Mood.WISHED, Style.PYTHON).vote == -1
    assert {feedback.vote for feedback in handwritten_phrases()} == {1, 0, -1}
    assert all((feedback.style is not None) is (feedback.mood is Mood.WISHED) for feedback in handwritten_phrases())


def test_a_wish_needs_a_style() -> None:
    with pytest.raises(ValueError, match="a wish needs a style"):
        Typist(random.Random(0)).feedback(Mood.WISHED)
