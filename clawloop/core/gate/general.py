"""General questions with checkable answers: those that a base model answers rightly watch over a policy's content.

They come with us, so that a loss of content is seen on any model, without a probe of an operator's. A right answer has
the pattern as a whole word or number; of "2.5" neither 2 nor 5 is.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from dataclasses import dataclass
from functools import cache

from clawloop.core.contracts.training import ProbeContent

ANSWER_TOKENS = 24
"""Longest answer when the base model is asked: a question that needs more costs too much at each version."""
KNOWN_ANSWERS, KNOWN_TEMPERATURE = 2, 0.6
"""How often, and how, a base model is asked to find out what it knows: each of its answers has to be right.

Sampled, since versions are compared by other answers, without sampling. Questions chosen by those would all be right
before the first step, some of them by a hair, and any change of the weights would look like a loss.
"""
MIN_KNOWN = 8
"""Fewest questions that the base model has to know: with fewer, right answers may be luck, and a version that lost all
of them could hardly be told from chance."""
# Of a word or a number: no letter or digit, and no part of a decimal number.
_BEFORE = r"(?i:(?:^|[^\pL\pN.,]|[^\pN][.,])"
_AFTER = r"(?:$|[^\pL\pN.,]|[.,](?:[^\pN]|$)))"


@dataclass(frozen=True, slots=True)
class GeneralQuestion:
    language: str
    content: ProbeContent


@cache
def general_questions() -> tuple[GeneralQuestion, ...]:
    """All questions, in the order of their file, general_questions.toml."""
    file = importlib.resources.files("clawloop.core.gate") / "general_questions.toml"
    by_language = tomllib.loads(file.read_text(encoding="utf-8"))
    return tuple(
        GeneralQuestion(language, _content(question, answer))
        for language, asked in by_language.items()
        for question, answer in asked.items()
    )


def _content(question: str, answer: str) -> ProbeContent:
    return ProbeContent(messages=[{"role": "user", "content": question}], regex=f"{_BEFORE}(?:{answer}){_AFTER}")


def why_not_watched(known: int | None) -> str:
    """The reason that general questions say nothing about a policy's versions; empty if they do.

    Args:
        known: number of the questions that its base model knows; None: it was not asked yet.
    """
    if known is None:
        return "the base model has not answered the general questions yet"
    if known < MIN_KNOWN:
        of_all = f"{known} of {len(general_questions())} general questions"
        return f"the base model knows {of_all}, and {MIN_KNOWN} are needed to watch its content by them"
    return ""
