"""The demo's synthetic user: phrases, worlds, examples, probes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from clawloop.app.demo.examples import LEARNED_FORMS, Lesson, Lessons, hint_answer, vote_answer
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
from clawloop.app.demo.user import SyntheticUser, joined
from clawloop.app.demo.world import (
    AXIS_OF,
    CHAT,
    EVALUATION,
    HINTS,
    PROBES,
    STYLES,
    Axis,
    Request,
    Style,
    answer,
    demo_probes,
    draw_preference,
    every_request,
    grade,
    other,
    style_of,
    taught_requests,
)
from clawloop.core.gate.checks import is_right
from clawloop.core.judging.evidence import Evidence, Statement
from clawloop.core.judging.hints import LEAD_IN, choose_hints, fault_of
from clawloop.core.judging.prompts import HINT_INSTRUCTION, VOTE_INSTRUCTION, AnswerForm
from clawloop.core.judging.voting import HintVote, parse_hint, parse_vote
from clawloop.operations.probes import MOST_PROBES

# The synthetic user: determinism, and reactions that follow the preference.


def test_the_same_seed_is_the_same_user() -> None:
    def texts(seed: int) -> list[str]:
        user = SyntheticUser(seed)
        request = user.first_request()
        said = [request.text]
        for _ in range(20):
            follow_up = user.follow_up(request, answer(request, STYLES[request.axis][0]))
            said.append(follow_up.text)
            request = follow_up.request
        return said

    assert texts(3) == texts(3) != texts(4)
    assert SyntheticUser(3).preference == draw_preference(3)


def test_requests_come_from_chats_and_show_each_axis_equally_often() -> None:
    user = SyntheticUser(0)
    requests = [user.next_request() for _ in range(60)]
    assert all(request in CHAT[request.axis] for request in requests)
    assert set(Counter(request.axis for request in requests).values()) == {20}


def test_a_user_thanks_for_what_it_likes_and_names_what_it_wanted() -> None:
    user = SyntheticUser(1)
    liked, disliked = Counter[bool](), Counter[bool]()
    for _ in range(300):
        request = user.next_request()
        style = user.preference[request.axis]
        liked[bool(user.react(request, answer(request, style)))] += 1
        disliked[bool(user.react(request, answer(request, other(style))))] += 1
    assert 0.7 < liked[True] / 300 < 0.9
    assert disliked[True] / 300 > 0.9


def test_a_user_types_nothing_that_model_or_judge_was_trained_on() -> None:
    typed = set()
    for seed in range(4):
        user = SyntheticUser(seed)
        for at in range(150):
            request = user.next_request()
            shown = answer(request, STYLES[request.axis][at % 2]) if at % 3 else "nonsense"
            typed.add(user.react(request, shown))
    typed.discard("")
    assert len(typed) > 200
    assert [text for text in typed if not is_held_out(text)] == []


def test_wrong_content_is_always_complained_about() -> None:
    user = SyntheticUser(2)
    assert all(user.react(user.next_request(), "I do not know.") for _ in range(50))


def test_a_follow_up_holds_reaction_and_request() -> None:
    user = SyntheticUser(5)
    request = user.first_request()
    follow_up = user.follow_up(request, "nonsense")
    assert follow_up.text == f"{follow_up.reaction}\n{follow_up.request.text}"
    assert joined("", "Explain rain.") == "Explain rain."


# Feedback: held-out phrases never occur in training data.

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


# The demo's world: disjoint, deterministic, graded by program.

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


# Lessons: real judge prompts, parseable answers, balanced styles.


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


@pytest.mark.parametrize("form", LEARNED_FORMS)
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
    assert choose_hints([written, None, HintVote(False, None)], evidence).text == written.text


# The demo's probes ask what nobody else does, and take the right content in either style.


def test_no_user_types_them_and_no_evaluation_asks_them() -> None:
    typed = {request.text for axis in Axis for request in CHAT[axis]} | {request.text for request in EVALUATION}
    asked = {probe.messages[0]["content"] for probe in demo_probes()}
    assert not asked & typed
    assert len(asked) == len(PROBES) == 120 <= MOST_PROBES


def test_the_right_content_in_either_style_is_right_and_nothing_else() -> None:
    for request, probe in zip(PROBES, demo_probes(), strict=True):
        first, second = (answer(request, style) for style in STYLES[request.axis])
        assert is_right(probe, first)
        assert is_right(probe, f"\n{second} ")
        assert not is_right(probe, first[:-4])
        assert not is_right(probe, first + second)
    texts = {answer(request, style) for request in PROBES for style in STYLES[request.axis]}
    assert all(sum(bool(is_right(probe, text)) for text in texts) == 2 for probe in demo_probes()[:3])
