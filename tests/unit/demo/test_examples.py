"""Lessons: real judge prompts, parseable answers, balanced styles."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from clawloop.app.demo.examples import Lesson, Lessons, hint_answer, vote_answer
from clawloop.app.demo.phrasing import Feedback, Mood
from clawloop.app.demo.world import HINTS, Axis, Style, every_request, style_of
from clawloop.core.judging.evidence import Evidence, Statement
from clawloop.core.judging.hints import LEAD_IN, choose_hint, fault_of
from clawloop.core.judging.prompts import HINT_INSTRUCTION, VOTE_INSTRUCTION, AnswerForm
from clawloop.core.judging.voting import HintVote, parse_hint, parse_vote


@pytest.fixture(scope="module")
def lessons() -> list[Lesson]:
    return [lesson for together in islice(Lessons(0), 4000) for lesson in together]


def test_the_same_seed_gives_the_same_lessons(lessons: list[Lesson]) -> None:
    again = [lesson for together in islice(Lessons(0), 200) for lesson in together]
    assert again == lessons[: len(again)]


def test_every_kind_of_lesson_occurs(lessons: list[Lesson]) -> None:
    kinds = Counter(lesson.kind for lesson in lessons)
    assert set(kinds) == {"answer", "hinted", "reaction", "vote", "hint", "brief vote", "brief hint"}
    assert min(kinds.values()) > 50


def test_free_answers_come_in_both_styles_of_the_same_request(lessons: list[Lesson]) -> None:
    free = [lesson for lesson in lessons if lesson.kind == "answer"]
    for one, two in zip(free[::2], free[1::2], strict=True):
        assert one.messages == two.messages
        assert {style_of(one.reply), style_of(two.reply)} != {None}
        assert style_of(one.reply) is not style_of(two.reply)


def test_hints_stand_where_the_teacher_gets_them(lessons: list[Lesson]) -> None:
    hinted = [lesson for lesson in lessons if LEAD_IN in str(lesson.messages[-1]["content"])]
    assert len(hinted) > 300
    texts = {text for of_style in HINTS.values() for text in of_style}
    for lesson in hinted:
        assert str(lesson.messages[-1]["content"]).rpartition(LEAD_IN)[2] in texts


@pytest.mark.parametrize("form", list(AnswerForm))
def test_judge_prompts_are_the_real_ones_and_right_answers_can_be_read(form: AnswerForm) -> None:
    source = Lessons("read back")
    for style in Style:
        wish = Feedback("not like this", Mood.WISHED, style)
        vote, hint = source.ask_vote(wish, form), source.ask_hint(wish, form)
        assert vote.messages[0]["content"] == VOTE_INSTRUCTION
        assert hint.messages[0]["content"] == HINT_INSTRUCTION
        assert "not like this" in str(vote.messages[1]["content"])
        assert parse_vote(vote_answer(vote, -1), vote) == -1
        assert parse_hint(hint_answer(hint, style), hint) == HintVote(True, HINTS[style][0])
        assert parse_hint(hint_answer(hint, None), hint) == HintVote(False, None)


def test_no_hint_is_trivial() -> None:
    for style, texts in HINTS.items():
        for request in (every_request(axis)[0] for axis in Axis):
            for text in texts:
                assert fault_of(text, request=request.text, reply="```python\n1\n```") is None, (style, text)


def test_a_written_hint_is_chosen() -> None:
    evidence = Evidence(
        (), Statement("user", "Explain rain."), (), (Statement("assistant", "In short, rain."),), (), None
    )
    written = HintVote(True, HINTS[Style.DETAILED][0])
    assert choose_hint([written, None, HintVote(False, None)], evidence).text == written.text
