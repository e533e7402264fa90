"""The yardstick's users: rules on a reply's text, and reactions that no prompt of ours holds."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from clawloop.app.evaluation.homework import Task
from clawloop.app.evaluation.users import KIND_WORDS, LEAST_TOKENS, User, tokens, wordings
from tests.rules.tables import ROOT

OWN = ROOT / "clawloop" / "app" / "evaluation" / "reactions.toml"
PLAIN = "First I add 3 and 4, which makes 7."


@pytest.mark.parametrize(
    ("user", "reply", "faults"),
    [
        (User.STUDENT, PLAIN, []),
        (User.STUDENT, "It is 3 * 4 - 2 = 10 in all.", []),
        (User.STUDENT, f"{PLAIN} **7**", ["bold"]),
        (User.STUDENT, "Steps:\n1. add 3 and 4", ["list"]),
        (User.STUDENT, "Steps:\n  - add 3 and 4\n\\boxed{7}", ["list", "boxed"]),
        (User.STUDENT, "", ["empty"]),
        (User.STUDENT, ".", ["empty"]),
        (User.ASSISTANT, "word " * (LEAST_TOKENS - 1), ["short"]),
        (User.ASSISTANT, "word " * LEAST_TOKENS, []),
        (User.ASSISTANT, "", ["short"]),
        (User.TEACHER, "Great Job, Tim!", []),
        (User.TEACHER, "You did well. Done.", ["cold"]),
        (User.TEACHER, "", ["cold"]),
    ],
)
def test_a_first_reply_is_checked_by_its_text_alone(user: User, reply: str, faults: list[str]) -> None:
    assert user.faults(reply) == faults


def test_tokens_are_words_digits_and_marks() -> None:
    assert tokens("It's 42, isn't it?") == len(["It", "'", "s", "4", "2", ",", "isn", "'", "t", "it", "?"])


@pytest.mark.parametrize("user", User)
def test_reactions_have_many_wordings_and_hold_nothing_that_a_rule_looks_for(user: User) -> None:
    rng = random.Random(1)
    faults = {User.STUDENT: ["bold", "list", "boxed", "empty"], User.ASSISTANT: ["short"], User.TEACHER: ["cold"]}[user]
    complaints = {user.reaction([fault], rng) for fault, _ in product(faults, range(300))}
    praise = {user.reaction([], rng) for _ in range(300)}
    assert len(complaints) >= 200
    assert len(praise) >= 10
    assert not complaints & praise
    said = " ".join(wordings(user)).lower()
    assert [word for word in (*KIND_WORDS, "**", "\\boxed", "100") if word in said] == []


@pytest.mark.parametrize("user", User)
def test_nobody_says_at_first_what_they_want(user: User) -> None:
    openings = {user.opening(Task("How many apples are there?", "7"), random.Random(seed)) for seed in range(60)}
    assert len(openings) >= 3
    told = re.compile(r"bold|list|bullet|boxed|long|detail|thorough|kind|warm|friendly|praise|well done", re.IGNORECASE)
    assert [text for text in openings if told.search(text)] == []


@pytest.mark.parametrize("answer", ["7", "2.5", "12345678"])
def test_half_of_the_pupils_are_wrong_by_a_little(answer: str) -> None:
    shown = [
        User.TEACHER.opening(Task("How many?", answer), random.Random(seed)).rpartition("The pupil's answer: ")[2]
        for seed in range(200)
    ]
    wrong = [number for number in shown if number != answer]
    assert 60 < len(wrong) < 140
    assert all(0 < abs(float(number) - float(answer)) <= 10 for number in wrong)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower().replace("’", "'"))


def test_no_wording_is_in_a_prompt_or_lesson_of_ours() -> None:
    """No five words in a row of a reaction, nor a whole one, in any source or list that comes with Clawloop."""
    folders = ("activities", "api", "clawloop", "db", "deploy", "workflows")
    kinds = (".py", ".toml", ".txt", ".json", ".jsonl", ".html", ".md")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds and path != OWN]
    assert any("judging" in path.parts and path.name == "prompts.py" for path in files)
    assert any(path.name == "examples.toml" for path in files)
    lengths = (3, 4, 5)
    wanted: dict[tuple[str, ...], str] = {}
    for user in User:
        for wording in wordings(user):
            words = _words(wording)
            if len(words) in lengths[:2]:
                wanted[tuple(words)] = wording
            wanted |= {tuple(words[at : at + 5]): wording for at in range(len(words) - 4)}
    found = set()
    for path in files:
        words = _words(path.read_text(encoding="utf-8"))
        for length in lengths:
            grams = zip(*(words[at:] for at in range(length)), strict=False)
            found |= {(path.name, wanted[gram]) for gram in grams if gram in wanted}
    assert found == set()
