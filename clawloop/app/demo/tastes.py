"""Tastes of the person of `clawloop demo run`, each checked by a rule, with requests and reactions.

A taste is a rule on a reply's text alone, so that no model grades. Which taste a person has is drawn by the seed, among
those that the base model seldom meets, and meets when it is told.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from clawloop.app.demo.phrasing import Mood, UnseenTypist
from clawloop.core.judging.hints import with_hint

_WORDS = Path(__file__).parent / "words"
_SAID = tomllib.loads((_WORDS / "tastes.toml").read_text(encoding="utf-8"))
_ASKED = tomllib.loads((_WORDS / "everyday.toml").read_text(encoding="utf-8"))

MOST_BEFORE = 0.6
"""A taste that the base model meets more often than this is no person's: there would be little to learn."""
LEAST_TOLD = 0.25
"""A taste is learned only if being told makes this share of replies more meet it, since the teacher is the model that
was told. By that SmolLM2-135M's brief replies, which it learned, gained 35 to 56 points, all others 22 at most."""
_HELD_OUT_EVERY = 6  # every sixth subject is for measuring only
_MOST_WORDS, _LEAST_WORDS = 40, 3  # of a brief reply; fewer are no answer
_LEAST_PROSE = 8  # words: "yes." is no prose

_ITEM = re.compile(r"(?m)^\s*(?:\d+[.)]|[-*•])\s")
_MARKUP = re.compile(r"(?m)\*\*|^#")
_KIND = re.compile(
    r"(?i)\W*(?:hi|hey|hello|good (?:morning|day|evening)|greetings|welcome|thank|thanks|great question|good question"
    r"|what a|nice|glad|happy to|i'd be happy|i'm happy|i'm glad|my pleasure|of course|sure|dear|lovely|wonderful)\b"
)
_HEDGE = re.compile(
    r"(?i)\b(?:may|might|maybe|perhaps|can|could|often|usually|typically|generally|sometimes|likely|probably|possibly"
    r"|tends? to|in general|some|various|it depends)\b"
)
_EXAMPLE = re.compile(r"(?i)\b(?:for example|for instance|an example|e\.g\.|imagine|say you)")


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Args:
        ended: by the model itself, not by the limit of tokens.
    """

    text: str
    ended: bool

    @property
    def words(self) -> int:
        return len(self.text.split())


class Taste(StrEnum):
    """A person's taste in replies; `words/tastes.toml` has the wordings of such a person."""

    BRIEF = "brief"
    PROSE = "prose"
    ASKS = "asks"
    FRIENDLY = "friendly"
    DIRECT = "direct"
    STEPS = "steps"
    EXAMPLE = "example"

    @property
    def text(self) -> str:
        """The rule, for people."""
        return str(_SAID[self]["text"])

    def is_met(self, answer: Answer) -> bool:
        """True if a reply is as such a person likes it. One without words never is."""
        return answer.words >= _LEAST_WORDS and _RULES[self](answer)


_RULES: Mapping[Taste, Callable[[Answer], bool]] = {
    Taste.BRIEF: lambda answer: answer.ended and answer.words <= _MOST_WORDS,
    Taste.PROSE: lambda answer: answer.words >= _LEAST_PROSE and not _has_markup(answer.text),
    Taste.ASKS: lambda answer: answer.ended and answer.text.rstrip().endswith("?"),
    Taste.FRIENDLY: lambda answer: _KIND.match(answer.text) is not None,
    Taste.DIRECT: lambda answer: answer.words >= _LEAST_PROSE and _HEDGE.search(answer.text) is None,
    Taste.STEPS: lambda answer: len(_ITEM.findall(answer.text)) >= 2,
    Taste.EXAMPLE: lambda answer: _EXAMPLE.search(answer.text) is not None,
}


def _has_markup(text: str) -> bool:
    return _ITEM.search(text) is not None or _MARKUP.search(text) is not None


def share_met(taste: Taste, answers: Sequence[Answer]) -> float:
    """Share of the answers that meet a taste."""
    return sum(taste.is_met(answer) for answer in answers) / len(answers)


def tastes_to_learn(seed: int, base: Sequence[Answer]) -> list[Taste]:
    """The tastes in the seed's order, but those that the base model meets in more than 60 % of its answers.

    There always are some, since no answer is plain prose and has a list.

    Args:
        base: the base model's answers to held-out requests.
    """
    order = random.Random(f"taste {seed}").sample(list(Taste), len(Taste))
    return [taste for taste in order if share_met(taste, base) <= MOST_BEFORE]


def told(taste: Taste, number: int) -> str:
    """The held-out request of this number as the teacher of a person with this taste reads it: behind a wish."""
    said = wordings(taste)
    messages = with_hint([{"role": "user", "content": HELD_OUT[number]}], said[number * 7 % len(said)], spoken=True)
    assert messages is not None  # there is a user's text
    return str(messages[0]["content"])


def is_loop(text: str) -> bool:
    """True if a text says the same four words four times, or one word six times in a row."""
    words = text.lower().split()
    fours = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    in_a_row = any(len(set(words[at : at + 6])) == 1 for at in range(len(words) - 5))
    return in_a_row or max(fours.values(), default=0) >= 4


# Requests -------------------------------------------------------------------------------------------------------------


def _requests(*, held_out: bool) -> tuple[str, ...]:
    return tuple(
        ask.format(subject)
        for kind in _ASKED.values()
        for at, subject in enumerate(kind["subjects"])
        if (at % _HELD_OUT_EVERY == 0) is held_out
        for ask in kind["asks"]
    )


EVERYDAY: tuple[str, ...] = _requests(held_out=False)
"""Requests of chats."""
_BY_KIND = _requests(held_out=True)
# 13 and 32 have no common factor: each of the first 32 comes once, and the kinds take turns.
HELD_OUT: tuple[str, ...] = tuple(_BY_KIND[at * 13 % 32] for at in range(32))
"""Requests for measuring, of subjects that no chat has: in the first 16 as many of each kind as in the last."""


# Reactions ------------------------------------------------------------------------------------------------------------


def wordings(taste: Taste) -> tuple[str, ...]:
    """All that a person of this taste says of a reply that misses it, and that says how it should be."""
    said = _SAID[taste]
    return (*said["wishes"], *(f"{fault} {wish}" for fault in said["faults"] for wish in said["wishes"]))


_SILENT_WHEN_MET = 0.25
_SILENT_WHEN_MISSED = 0.1
_BARE_WHEN_MISSED = 0.1  # displeased, and does not say why
# A reaction is mostly a message of its own; otherwise the next request is in it. To a small model that reads it in
# hindsight a next request is louder than what is said of the reply (docs/results.md).
_ALONE = 0.8
_THUMB = 0.25
_FAULT_FIRST = 0.5


@dataclass(frozen=True, slots=True)
class Reaction:
    """A person's reaction to a reply.

    Args:
        text: the next message: what is said of the reply, the next request, or both.
        request: the request that the next reply answers, the same again after a complaint; empty after mere thanks.
        wish: what is said of how replies should be; empty if nothing is.
        thumb: a rating of the reply; None: none.
    """

    text: str
    request: str
    wish: str
    thumb: int | None


class Person:
    """Someone with one taste, in one session.

    Args:
        seed: of all draws, so that two runs differ by the model's replies alone.
    """

    def __init__(self, seed: str, taste: Taste) -> None:
        self._taste = taste
        self._random = random.Random(f"person {seed}")
        self._typist = UnseenTypist(random.Random(f"typist {seed}"))

    def request(self) -> str:
        """A request of everyday life."""
        return self._random.choice(EVERYDAY)

    def react(self, request: str, answer: Answer) -> Reaction:
        """The reaction to a reply to a request, or to mere thanks, after which the next request comes."""
        draw, thumbs, alone = self._random.random(), self._random.random() < _THUMB, self._random.random() < _ALONE
        following, wish = self.request(), ""
        if not request:
            return Reaction(following, following, wish, None)
        is_met = self._taste.is_met(answer)
        said = ""
        if is_met and draw >= _SILENT_WHEN_MET:
            said = self._typist.feedback(Mood.LIKED).text
        elif not is_met and draw < _BARE_WHEN_MISSED:
            said = self._typist.feedback(Mood.DISLIKED).text
        elif not is_met and draw >= _BARE_WHEN_MISSED + _SILENT_WHEN_MISSED:
            said = wish = self._complaint()
        thumb = (1 if is_met else -1) if thumbs else None
        if said and alone:
            return Reaction(said, "" if is_met else request, wish, thumb)
        return Reaction(f"{said}\n{following}" if said else following, following, wish, thumb)

    def _complaint(self) -> str:
        """A wish, in half of the complaints after a fault."""
        said = _SAID[self._taste]
        fault = f"{self._random.choice(said['faults'])} " if self._random.random() < _FAULT_FIRST else ""
        return f"{fault}{self._random.choice(said['wishes'])}"
