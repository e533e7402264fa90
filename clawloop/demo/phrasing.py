"""Feedback as people type it: patterns filled with words, then shortened, mistyped and decorated.

Knows nothing about requests or judges. What is held out is fixed once and for all: one phrase in ten of those
that can be built, whole patterns, and `holdout_phrases.OWN`. `Typist` never gives a phrase that reads like one of
them, whatever its case, punctuation and spaces.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from hashlib import blake2b

from clawloop.demo import multilingual_phrases, phrases
from clawloop.demo.holdout_phrases import OWN
from clawloop.demo.world import STYLES, Style, other

_WORDS = {name: phrases.split(text) for name, text in (phrases.WORDS | multilingual_phrases.MULTILINGUAL_WORDS).items()}
_MANNER = {
    Style.CONCISE: {"adj": "short", "noun": "shortly", "fault": "wordy"},
    Style.DETAILED: {"adj": "long", "noun": "fully", "fault": "thin"},
    Style.FORMAL: {"adj": "formal", "noun": "formally", "fault": "chummy"},
    Style.FRIENDLY: {"adj": "friendly", "noun": "friendlily", "fault": "stiff"},
}
MEASURED_PHRASES = 480  # of each held-out kind
_HELD_OUT_SHARE = 10  # one phrase in ten
_ABROAD_SHARE = 0.2
_SHORT_SHARE = 0.25
_ASIDE_SHARE = 0.3
# Said before or after anything, they change nothing: the model learns a short phrase's words beside them.
_BEFORE = (
    "hey",
    "well",
    "ok",
    "so",
    "hm",
    "oh",
    "lol",
    "and",
    "ah",
    "hi",
    "hmm",
    "um",
    "so yeah",
    "honestly",
    "imo",
    "ok so",
)
_AFTER = (
    "mate",
    "bro",
    "man",
    "dude",
    "bot",
    "friend",
    "then",
    "now",
    "lol",
    "haha",
    "hm",
    "buddy",
    "tbh",
    "i guess",
    "ok",
)
_MOST_TRIES = 1000  # phrases in a row that are held out; a pattern list this poor is a mistake
_NEIGHBOURS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wqreyturoisaffjhlkxzvcmnb", strict=False))


class Mood(StrEnum):
    """What a piece of feedback says about the answer before it."""

    LIKED = "liked"
    DISLIKED = "disliked"  # without a word on what was wanted
    WISHED = "wished"  # disliked, and it names the style that was wanted
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a user types after an answer.

    Args:
        style: the style it asks for; None unless `mood` is WISHED.
    """

    text: str
    mood: Mood
    style: Style | None = None

    @property
    def vote(self) -> int:
        return {Mood.LIKED: 1, Mood.UNREADABLE: 0}.get(self.mood, -1)


def normal(text: str) -> str:
    """What two phrases share that differ in case, punctuation and white space only."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(c for c in folded if not (c.isspace() or unicodedata.category(c).startswith("P")))
    return letters or "".join(folded.split())


def is_held_out(text: str) -> bool:
    """True for one phrase in ten, by its normal form, and for those of `holdout_phrases` and held-out patterns."""
    form = normal(text)
    return form in _kept_out() or blake2b(form.encode(), digest_size=4).digest()[0] % _HELD_OUT_SHARE == 0


class Typist:
    """A source of feedback.

    Args:
        held_out: None for phrases to train on; "phrase" for held-out phrases of patterns that are trained on;
            "pattern" for patterns that are not.
    """

    def __init__(self, chance: random.Random, held_out: str | None = None):
        self._chance = chance
        self._held_out = held_out

    def feedback(self, mood: Mood, style: Style | None = None) -> Feedback:
        """One piece of feedback; with WISHED it asks for `style`."""
        for _ in range(_MOST_TRIES):
            text = self._typed(self._plain(mood, style), mood)
            if text and (self._held_out == "pattern" or is_held_out(text) is (self._held_out == "phrase")):
                return Feedback(text, mood, style if mood is Mood.WISHED else None)
        raise ValueError(f"no phrase to be had for {mood} {style}")

    def _plain(self, mood: Mood, style: Style | None) -> str:
        if mood is Mood.UNREADABLE and self._chance.random() < 0.2:
            return _gibberish(self._chance)
        pool = _patterns(mood, style, self._held_out == "pattern")
        words = _words_for(style)
        home, abroad = pool
        patterns = abroad if abroad and self._chance.random() < _ABROAD_SHARE else home
        pattern = self._chance.choice(patterns)
        if self._chance.random() < _SHORT_SHARE:  # people are brief more often than patterns are
            pattern = min(pattern, *(self._chance.choice(patterns) for _ in range(5)), key=len)
        return re.sub(r"\{(\w+)\}", lambda found: self._chance.choice(words[found[1]]), pattern)

    def _typed(self, text: str, mood: Mood) -> str:
        chance = self._chance
        if self._held_out is None and chance.random() < _ASIDE_SHARE:
            text = f"{chance.choice(_BEFORE)} {text}" if chance.random() < 0.4 else f"{text} {chance.choice(_AFTER)}"
        draw = chance.random()
        if draw < 0.5:
            text = text.lower()
        elif draw < 0.75:
            text = text[:1].upper() + text[1:]
        elif draw < 0.8:
            text = text.upper()
        if chance.random() < 0.25:
            text = re.sub(r"[,.'!?]", "", text)
        if chance.random() < 0.1:
            text = _mistyped(text, chance)
        if chance.random() < 0.3:
            text += chance.choice((".", ".", "!", "!", "!!", "!!!", "...", " :)" if mood is Mood.LIKED else "?"))
        if mood in (Mood.LIKED, Mood.DISLIKED) and chance.random() < 0.08:
            text += " " + chance.choice(_WORDS["happy" if mood is Mood.LIKED else "sad"])
        return text


def held_out_phrases(held_out: str, count: int) -> tuple[Feedback, ...]:
    """Different phrases of all moods in turn, always the same: what the judge is measured on."""
    chance = random.Random(f"held out {held_out}")
    typist = Typist(chance, held_out)
    wished = [style for styles in STYLES.values() for style in styles]
    found: dict[str, Feedback] = {}
    moods = (Mood.LIKED, Mood.DISLIKED, Mood.WISHED, Mood.UNREADABLE)
    turn = 0
    while len(found) < count:
        feedback = typist.feedback(moods[turn % len(moods)], wished[turn // len(moods) % len(wished)])
        found.setdefault(normal(feedback.text), feedback)
        turn += 1
    return tuple(found.values())


def holdout_phrases_by_hand() -> tuple[Feedback, ...]:
    """Our own list."""
    moods = {1: Mood.LIKED, 0: Mood.UNREADABLE, -1: Mood.DISLIKED}
    return tuple(
        Feedback(text, Mood.WISHED if style else moods[vote], Style(style) if style else None)
        for text, vote, style in OWN
    )


@cache
def _kept_out() -> frozenset[str]:
    patterned = (feedback.text for feedback in held_out_phrases("pattern", MEASURED_PHRASES))
    return frozenset(normal(text) for text in (*patterned, *(text for text, _, _ in OWN)))


@cache
def _patterns(mood: Mood, style: Style | None, held_out: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns in English, and in other languages."""
    if mood is Mood.LIKED:
        texts, abroad = [phrases.LIKED], multilingual_phrases.MULTILINGUAL_LIKED
    elif mood is Mood.DISLIKED:
        texts, abroad = [phrases.DISLIKED], multilingual_phrases.MULTILINGUAL_DISLIKED
    elif mood is Mood.UNREADABLE:
        texts, abroad = [phrases.UNREADABLE], multilingual_phrases.MULTILINGUAL_UNREADABLE
    elif style in _MANNER:
        # The patterns of one style alone are fewer, and as important.
        texts = [phrases.WISHED_MANNER, phrases.WISHED_BY_STYLE[style]]
        abroad = multilingual_phrases.MULTILINGUAL_WISHED[style]
    elif style is not None:
        texts, abroad = [phrases.WISHED_CODE], multilingual_phrases.MULTILINGUAL_WISHED[style]
    else:
        raise ValueError("a wish needs a style")
    return tuple(p for text in texts for p in _part(text, held_out)), _part(abroad, held_out)


def _part(text: str, held_out: bool) -> tuple[str, ...]:
    kept: list[str] = []
    for line in text.replace(f"|{phrases.HELD_OUT_MARK}", f"\n{phrases.HELD_OUT_MARK}").strip().splitlines():
        if line.startswith(phrases.HELD_OUT_MARK) is held_out:
            kept += phrases.split(line.removeprefix(phrases.HELD_OUT_MARK))
    return tuple(kept)


@cache
def _words_for(style: Style | None) -> Mapping[str, tuple[str, ...]]:
    if style is None:
        return _WORDS
    if style in _MANNER:
        return _WORDS | {slot: _WORDS[name] for slot, name in _MANNER[style].items()}
    return _WORDS | {"X": _WORDS[style], "Y": _WORDS[other(style)]}


def _gibberish(chance: random.Random) -> str:
    letters = chance.choice(("asdfghjkl", "qwertzuiop", "abcdefghijklmnopqrstuvwxyz", "xyz", "0123456789", "?.!-"))
    words = ("".join(chance.choice(letters) for _ in range(chance.randint(1, 8))) for _ in range(chance.randint(1, 3)))
    return " ".join(words)


def _mistyped(text: str, chance: random.Random) -> str:
    """One slip of the finger: a letter left out, doubled, swapped, or its neighbour."""
    places = [at for at in range(1, len(text)) if text[at].isalpha() and text[at].isascii()]
    if len(places) < 3:
        return text
    at = chance.choice(places)
    slip = chance.randrange(4)
    if slip == 0:
        return text[:at] + text[at + 1 :]
    if slip == 1:
        return text[:at] + text[at] * chance.randint(2, 4) + text[at + 1 :]
    if slip == 2:
        return text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]
    return text[:at] + _NEIGHBOURS.get(text[at].lower(), text[at]) + text[at + 1 :]
