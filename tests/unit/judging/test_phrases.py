"""Labelled phrases: examples, and the lists that a judge is calibrated and measured on."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import pytest

from clawloop.core.errors import SetupError
from clawloop.core.judging.evidence import Evidence
from clawloop.core.judging.phrases import KINDS, PhraseList, parse_phrases, phrases_of


def texts(evidence: Evidence) -> list[str]:
    assert evidence.task is not None
    return [one.text for one in (evidence.task, *evidence.reply, *evidence.next_state)]


def word_runs(phrase_list: PhraseList) -> set[tuple[str, ...]]:
    """All runs of four words in its texts, and whole texts that are shorter."""
    found: set[tuple[str, ...]] = set()
    for phrase in phrases_of(phrase_list):
        for text in texts(phrase.evidence):
            words = re.findall(r"\w+", text.casefold())
            found |= {tuple(words[at : at + 4]) for at in range(max(1, len(words) - 3))} - {()}
    return found


@pytest.mark.parametrize(("one", "other"), list(combinations(PhraseList, 2)))
def test_two_lists_share_no_wording(one: PhraseList, other: PhraseList) -> None:
    assert word_runs(one) & word_runs(other) == set()


def test_the_lists_have_their_sizes_kinds_and_languages() -> None:
    examples = phrases_of(PhraseList.EXAMPLES)
    assert Counter(phrase.vote for phrase in examples) == {1: 4, 0: 4, -1: 4}
    assert len(phrases_of(PhraseList.CALIBRATION)) >= 50
    for measured in (PhraseList.TRIAL, PhraseList.REPORTED):
        phrases = phrases_of(measured)
        assert len(phrases) == 100
        assert {phrase.kind for phrase in phrases} == set(KINDS)
        assert {phrase.language for phrase in phrases} == {"en", "de", "es"}
        assert min(Counter(phrase.vote for phrase in phrases).values()) >= 20


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("talk = 1", "mine.toml: talk: Input should be a valid list"),
        ("[[talk]]\nreply = 'x'", "mine.toml: talk.0.task: Field required"),
        ("[[talk]]\ntask = 'x'\nliked = ['y']", "mine.toml: talk.0.liked: Extra inputs"),
        ("[[talk", "mine.toml is not TOML"),
    ],
)
def test_a_file_of_ones_own_is_refused_with_the_place(text: str, why: str) -> None:
    with pytest.raises(SetupError, match=re.escape(why)):
        parse_phrases(text, "mine.toml")


def test_a_file_of_ones_own_has_phrases_by_kind() -> None:
    text = "[[talk]]\ntask = 'Add 1 and 1.'\nreply = '3'\ncorrects = ['It is 2.', 'No, 2.']\nthanks = ['Thanks.']"
    found = parse_phrases(text, "mine.toml")
    assert [(phrase.kind, phrase.vote) for phrase in found] == [("thanks", 1), ("corrects", -1), ("corrects", -1)]
