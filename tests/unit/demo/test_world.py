"""The demo's world: disjoint, deterministic, graded by program."""

from __future__ import annotations

from itertools import islice

import pytest

from clawloop.app.demo.examples import Lessons
from clawloop.app.demo.world import (
    AXIS_OF,
    CHAT,
    EVALUATION,
    STYLES,
    Axis,
    Request,
    Style,
    answer,
    draw_preference,
    every_request,
    grade,
    other,
    style_of,
    taught_requests,
)

FIRST = {axis: styles[0] for axis, styles in STYLES.items()}
EVERYTHING = [request for axis in Axis for request in every_request(axis)]


def test_there_are_enough_requests_and_no_text_twice() -> None:
    texts = [request.text for request in EVERYTHING]
    assert len(texts) >= 100
    assert len(set(texts)) == len(texts)


def test_evaluation_shares_no_subject_with_chats() -> None:
    asked = {(request.axis, request.subject) for requests in CHAT.values() for request in requests}
    assert len(EVALUATION) == len(set(EVALUATION)) == 60
    assert [request for request in EVALUATION if (request.axis, request.subject) in asked] == []
    assert [[request.axis for request in EVALUATION].count(axis) for axis in Axis] == [20, 20, 20]


def test_no_lesson_has_an_evaluation_request() -> None:
    evaluated = {request.text.lower().rstrip(".?") for request in EVALUATION}
    taught = {request.text.lower().rstrip(".?") for axis in Axis for request in taught_requests(axis)}
    assert len(taught) > 2400
    assert not taught & evaluated
    # Their subjects are taught, or the right answers could not be known.
    subjects = {(request.axis, request.subject) for axis in Axis for request in taught_requests(axis)}
    assert {(request.axis, request.subject) for request in EVALUATION} <= subjects
    lines = {
        line.lower().rstrip(".?")
        for together in islice(Lessons(3), 1500)
        for lesson in together
        for message in lesson.messages
        for line in str(message["content"]).split("\n")
    }
    assert not lines & evaluated


def test_an_answer_with_wrong_content_matches_nobody() -> None:
    request = EVALUATION[0]
    assert not grade(request, answer(request, Style.PYTHON)[:-8], FIRST).match


def test_the_evaluation_requests_are_fixed() -> None:
    assert [request.text for request in EVALUATION[:3]] == [
        "I need a function that prints a greeting.",
        "Tell me about a magnet.",
        "Help me tell Felix about the next release.",
    ]


def test_both_styles_of_every_request_are_right_and_only_the_preferred_one_matches() -> None:
    for request in EVERYTHING:
        liked, disliked = STYLES[request.axis]
        assert (grade(request, answer(request, liked), FIRST)).match
        assert grade(request, answer(request, liked), FIRST).exact
        assert not grade(request, answer(request, disliked), FIRST).match
        assert grade(request, answer(request, disliked), FIRST).exact


@pytest.mark.parametrize("wrong", ["", "Yes.", "```python\ndef add(a, b):\n    return a - b\n```"])
def test_wrong_content_is_not_exact(wrong: str) -> None:
    request = Request(Axis.CODE, "adds two numbers", None, "Write a function that adds two numbers.")
    assert not grade(request, wrong, FIRST).exact


def test_the_answer_to_another_request_is_not_exact() -> None:
    adds, divides = (
        next(r for r in every_request(Axis.CODE) if r.subject == subject)
        for subject in ("adds two numbers", "divides two numbers")
    )
    assert not grade(adds, answer(divides, Style.PYTHON), FIRST).exact
    assert not grade(adds, answer(every_request(Axis.TONE)[0], Style.FORMAL), FIRST).exact


def test_space_around_an_answer_does_not_count() -> None:
    request = EVALUATION[0]
    assert grade(request, f"\n{answer(request, Style.PYTHON)}\n", FIRST).exact


def test_a_style_of_another_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="shows code cannot be answered in style formal"):
        answer(EVALUATION[0], Style.FORMAL)


def test_each_style_has_another_and_is_recognised() -> None:
    for style, axis in AXIS_OF.items():
        assert other(other(style)) is style
        assert {style, other(style)} == set(STYLES[axis])
        assert style_of(answer(every_request(axis)[0], style)) is style


def test_preferences_are_fixed_by_the_seed_and_all_of_them_occur() -> None:
    drawn = [tuple(draw_preference(seed).items()) for seed in range(100)]
    assert drawn == [tuple(draw_preference(seed).items()) for seed in range(100)]
    assert len(set(drawn)) == 8
