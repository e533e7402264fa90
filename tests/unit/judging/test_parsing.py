import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.judging.prompts import AnswerForm, hint_prompt, vote_prompt
from clawloop.core.judging.voting import HintVote, parse_hint, parse_vote
from tests.unit.judging.conversations import TURN, evidence, question

VOTE = vote_prompt(TURN, evidence())
BARE = vote_prompt(TURN, evidence(), AnswerForm.GRAMMAR)
HINT = hint_prompt(TURN, evidence())
M = VOTE.mark
REFUSED = HintVote(accepted=False, text=None)


@pytest.mark.parametrize(
    ("answer", "vote"),
    [
        (f"verdict {M}: 1", 1),
        (f"verdict {M}: 0", 0),
        (f"verdict {M}: -1", -1),
        (f"verdict {M}: +1", 1),
        (f"verdict {M}: −1", -1),
        (f"verdict {M}:-1", -1),
        (f"Verdict {M.upper()}: -1.", -1),
        (f"**verdict {M}: 1**", 1),
        (f"```\nverdict {M}: -1\n```\n", -1),
        (f"The user was not happy.\n\nverdict {M}: -1\n", -1),
        (f"Der Nutzer bedankt sich.\nverdict {M}：1", 1),
        (f"verdict {M}: 1\nOn second thought:\nverdict {M}: -1", -1),
        (f"<think>verdict {M}: 1</think>verdict {M}: -1", -1),
        (f"still thinking</think>\nverdict {M}: 0", 0),
    ],
)
def test_an_answer_that_ends_in_the_required_form_is_a_vote(answer: str, vote: int) -> None:
    assert parse_vote(answer, VOTE) == vote


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " \n\t",
        "1",
        "verdict: 1",
        "verdict 000000: 1",
        f"verdict {M}:",
        f"verdict {M}: 2",
        f"verdict {M}: 11",
        f"verdict {M}: 10",
        f"verdict {M}: --1",
        f"verdict {M}: - 1",
        f"verdict {M}: -0",
        f"verdict {M}: 1 or -1",
        f"verdict {M}: N",
        f"verdict {M}: 0.5",
        f"I would say verdict {M}: 1",
        f"verdict {M}: 1\nbut only because the user was polite.",
        f"<think>verdict {M}: 1",
        f"<think>so: verdict {M}: 1</think>",
        f"verdict {M[:-1]}: 1",
        f"verdict {M}0: 1",
        f"verdict {M}: 1" + " x" * 100,
        question(VOTE),
        "我不知道",
        "\x00\ud800",
    ],
)
def test_anything_else_is_a_missing_vote(answer: str) -> None:
    assert parse_vote(answer, VOTE) is None


@pytest.mark.parametrize(("answer", "vote"), [("1", 1), ("-1", -1), (" 0\n", 0), ("<think>x</think>\n1", 1)])
def test_a_constrained_answer_is_the_vote_itself(answer: str, vote: int) -> None:
    assert parse_vote(answer, BARE) == vote


@pytest.mark.parametrize("answer", ["", "+1", "2", "1.", "the answer is 1", f"verdict {M}: 1", "-", "1 1"])
def test_a_constrained_answer_of_any_other_text_is_missing(answer: str) -> None:
    assert parse_vote(answer, BARE) is None


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (f"hint {M}: Use Python.", "Use Python."),
        (f"It wants Python.\n\nhint {M}: Use Python.\n", "Use Python."),
        (f"**hint {M}:** Use Python.", "Use Python."),
        (f"hint {M}:\nUse Python.\nAnd be  brief.", "Use Python. And be brief."),
        (f"hint {M}: Be brief.\nhint {M}: Use Python.", "Use Python."),
        (f'hint {M}: "Antworte auf Deutsch."', "Antworte auf Deutsch."),
        (f"no hint {M}\nhint {M}: 用 Python 写。", "用 Python 写。"),
        (f"<think>no hint {M}</think>hint {M}: Use Python.", "Use Python."),
    ],
)
def test_an_answer_that_ends_in_a_hint_gives_it(answer: str, text: str) -> None:
    assert parse_hint(answer, HINT) == HintVote(accepted=True, text=text)


@pytest.mark.parametrize(
    "answer", [f"no hint {M}", f"No hint {M}.", f"hint {M}: Use Python.\n\nno hint {M}", f"hint {M}: none"]
)
def test_an_answer_may_be_that_there_is_no_hint(answer: str) -> None:
    assert parse_hint(answer, HINT) == REFUSED


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Use Python.",
        "hint: Use Python.",
        "hint 000000: Use Python.",
        "no hint",
        f"hint {M}:",
        f"hint {M}: ...",
        f"hint {M}: Use Python.\n\nI hope that helps!",
        f"I give this hint {M}: Use Python.",
        f"hint {M}: Use Python; no hint {M} is needed",
        f"hint {M}: " + "word " * 200,
        f"<think>hint {M}: Use Python.",
        question(HINT),
    ],
)
def test_any_other_answer_is_a_missing_hint_vote(answer: str) -> None:
    assert parse_hint(answer, HINT) is None


@given(st.text())
def test_no_text_raises_and_none_without_the_mark_counts(text: str) -> None:
    known = M in text.casefold()
    assert known or parse_vote(text, VOTE) is None
    assert known or parse_hint(text, HINT) is None
    parse_vote(text, BARE)


@given(
    st.text(alphabet=st.sampled_from(f"verdicthn {M}:+-−10\n*`.<>/"), max_size=60),
    st.sampled_from([-1, 0, 1]),
)
def test_an_answer_after_any_thoughts_counts(thoughts: str, vote: int) -> None:
    assert parse_vote(f"{thoughts}\nverdict {M}: {vote}", VOTE) == vote


@pytest.mark.parametrize(
    "piece",
    [
        "x",
        "\n",
        " ",
        "<think>",
        "</think>",
        f"hint {M}:",
        f"verdict {M}: 1\n",
        "\n \t",
        "*",
        "`\n",
        "no hint ",
    ],
)
def test_ten_megabytes_are_read_in_a_moment(piece: str) -> None:
    answer = piece * (10_000_000 // len(piece))
    began = time.process_time()
    parse_vote(answer, VOTE)
    parse_vote(answer, BARE)
    parse_hint(answer, HINT)
    assert time.process_time() - began < 3


def test_a_vote_at_the_end_of_ten_megabytes_counts() -> None:
    assert parse_vote("because " * 1_250_000 + f"\nverdict {M}: -1", VOTE) == -1
