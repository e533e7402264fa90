"""Generates feedback as people type it: patterns filled with words, with typing errors and decoration.

The patterns and words are in `words/english.toml` and `words/other_languages.toml`. Three sets are held out from
training: one generated phrase in ten, whole patterns, and the handwritten ones of `words/held_out.toml`. `Typist` gives
none of them in any case, punctuation or spacing.
"""

from __future__ import annotations

import random
import re
import tomllib
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from clawloop.app.demo.world import STYLES, Style, other

_HELD_OUT_MARK = "~"
_MANNER = {
    Style.CONCISE: {"adj": "short", "noun": "shortly", "fault": "wordy"},
    Style.DETAILED: {"adj": "long", "noun": "fully", "fault": "thin"},
    Style.FORMAL: {"adj": "formal", "noun": "formally", "fault": "chummy"},
    Style.FRIENDLY: {"adj": "friendly", "noun": "friendlily", "fault": "stiff"},
}
MEASURED_PHRASES = 480  # of each held-out kind
_HELD_OUT_SHARE = 10  # one phrase in ten
_MULTILINGUAL_SHARE = 0.2
_SHORT_SHARE = 0.25
_FILLER_SHARE = 0.3
# Fillers before and after a phrase do not change its meaning; they teach the model short phrases in context.
_FILLERS_BEFORE = (
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
_FILLERS_AFTER = (
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
_MAX_ATTEMPTS = 1000  # after so many rejected phrases the pattern list must be wrong
_NEIGHBOURS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wqreyturoisaffjhlkxzvcmnb", strict=False))


class Mood(StrEnum):
    """A user's opinion of the previous answer."""

    LIKED = "liked"
    DISLIKED = "disliked"  # names no preferred style
    WISHED = "wished"  # disliked, and names the preferred style
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Feedback:
    """A user's reaction to an answer.

    Args:
        style: the requested style; None unless `mood` is WISHED.
    """

    text: str
    mood: Mood
    style: Style | None = None

    @property
    def vote(self) -> int:
        return {Mood.LIKED: 1, Mood.UNREADABLE: 0}.get(self.mood, -1)


def normal(text: str) -> str:
    """Return the normal form of a phrase, without case, punctuation and white space."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(c for c in folded if not (c.isspace() or unicodedata.category(c).startswith("P")))
    return letters or "".join(folded.split())


def is_held_out(text: str) -> bool:
    """True for one normal form in ten, for handwritten ones and for measured phrases of held-out patterns."""
    form = normal(text)
    return form in _excluded_forms() or blake2b(form.encode(), digest_size=4).digest()[0] % _HELD_OUT_SHARE == 0


_Kinds: TypeAlias = Mapping[tuple[Mood, Style | None], Sequence[Feedback]]


class Typist:
    """A generator of feedback.

    Args:
        held_out: None for training phrases; "phrase" for held-out phrases of training patterns; "pattern" for
            phrases of held-out patterns.
    """

    def __init__(self, rng: random.Random, held_out: str | None = None):
        self._rng = rng
        self._held_out = held_out

    def feedback(self, mood: Mood, style: Style | None = None) -> Feedback:
        """Return feedback; with WISHED it requests `style`."""
        for _ in range(_MAX_ATTEMPTS):
            text = self._add_typing_noise(self._fill_pattern(mood, style), mood)
            if text and (self._held_out == "pattern" or is_held_out(text) is (self._held_out == "phrase")):
                return Feedback(text, mood, style if mood is Mood.WISHED else None)
        raise ValueError(f"no phrase found for mood {mood} and style {style}")

    def _fill_pattern(self, mood: Mood, style: Style | None) -> str:
        if mood is Mood.UNREADABLE and self._rng.random() < 0.2:
            return _gibberish(self._rng)
        english, multilingual = _patterns(mood, style, self._held_out == "pattern")
        words = _words_for(style)
        patterns = multilingual if multilingual and self._rng.random() < _MULTILINGUAL_SHARE else english
        pattern = self._rng.choice(patterns)
        if self._rng.random() < _SHORT_SHARE:  # people are brief more often than the patterns
            pattern = min(pattern, *(self._rng.choice(patterns) for _ in range(5)), key=len)
        return re.sub(r"\{(\w+)\}", lambda found: self._rng.choice(words[found[1]]), pattern)

    def _add_typing_noise(self, text: str, mood: Mood) -> str:
        rng = self._rng
        if self._held_out is None and rng.random() < _FILLER_SHARE:
            text = (
                f"{rng.choice(_FILLERS_BEFORE)} {text}"
                if rng.random() < 0.4
                else f"{text} {rng.choice(_FILLERS_AFTER)}"
            )
        draw = rng.random()
        if draw < 0.5:
            text = text.lower()
        elif draw < 0.75:
            text = text[:1].upper() + text[1:]
        elif draw < 0.8:
            text = text.upper()
        if rng.random() < 0.25:
            text = re.sub(r"[,.'!?]", "", text)
        if rng.random() < 0.1:
            text = _add_typo(text, rng)
        if rng.random() < 0.3:
            text += rng.choice((".", ".", "!", "!", "!!", "!!!", "...", " :)" if mood is Mood.LIKED else "?"))
        if mood in (Mood.LIKED, Mood.DISLIKED) and rng.random() < 0.08:
            text += " " + rng.choice(_words()["happy" if mood is Mood.LIKED else "sad"])
        return text


class UnseenTypist:
    """A generator of feedback in wordings that neither the demo's model nor its judge was trained on.

    A third each: held-out phrases of taught sentence patterns, phrases of held-out patterns, and handwritten ones.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._phrases = Typist(rng, "phrase")

    def feedback(self, mood: Mood, style: Style | None = None) -> Feedback:
        """Return feedback; with WISHED it requests `style`."""
        kinds = (None, *_unseen())
        chosen = self._rng.choice(kinds)
        if chosen is None:
            return self._phrases.feedback(mood, style)
        return self._rng.choice(chosen[mood, style if mood is Mood.WISHED else None])


def held_out_phrases(held_out: str, count: int) -> tuple[Feedback, ...]:
    """Return `count` distinct held-out phrases, the moods in turn; the result is always the same."""
    rng = random.Random(f"held out {held_out}")
    typist = Typist(rng, held_out)
    wished = [style for styles in STYLES.values() for style in styles]
    found: dict[str, Feedback] = {}
    moods = (Mood.LIKED, Mood.DISLIKED, Mood.WISHED, Mood.UNREADABLE)
    turn = 0
    while len(found) < count:
        feedback = typist.feedback(moods[turn % len(moods)], wished[turn // len(moods) % len(wished)])
        found.setdefault(normal(feedback.text), feedback)
        turn += 1
    return tuple(found.values())


@cache
def handwritten_phrases() -> tuple[Feedback, ...]:
    """Return the handwritten phrases, which are held out."""
    written = _table("held_out")
    kinds: list[tuple[Mood, Style | None, str]]
    kinds = [(Mood.LIKED, None, written["liked"]), (Mood.DISLIKED, None, written["disliked"])]
    kinds += [(Mood.WISHED, Style(style), texts) for style, texts in written["wished_by_style"].items()]
    kinds.append((Mood.UNREADABLE, None, written["unreadable"]))
    return tuple(Feedback(text, mood, style) for mood, style, texts in kinds for text in texts.strip().splitlines())


@cache
def _unseen() -> tuple[_Kinds, ...]:
    return _by_kind(held_out_phrases("pattern", MEASURED_PHRASES)), _by_kind(handwritten_phrases())


def _by_kind(phrases: Sequence[Feedback]) -> _Kinds:
    found: dict[tuple[Mood, Style | None], list[Feedback]] = defaultdict(list)
    for feedback in phrases:
        found[feedback.mood, feedback.style].append(feedback)
    return found


@cache
def _excluded_forms() -> frozenset[str]:
    patterned = (feedback.text for feedback in held_out_phrases("pattern", MEASURED_PHRASES))
    return frozenset(normal(text) for text in (*patterned, *(phrase.text for phrase in handwritten_phrases())))


@cache
def _patterns(mood: Mood, style: Style | None, held_out: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns in English and in other languages."""
    english, others = _table("english"), _table("other_languages")
    if mood is not Mood.WISHED:
        texts, multilingual = [english[mood.value]], others[mood.value]
    elif style is None:
        raise ValueError("a wish needs a style")
    else:
        manner = [english["wished_manner"], english["wished_by_style"].get(style.value, "")]
        texts = manner if style in _MANNER else [english["wished_code"]]
        multilingual = others["wished_by_style"][style.value]
    selected = tuple(pattern for text in texts for pattern in _select_patterns(text, held_out))
    return selected, _select_patterns(multilingual, held_out)


def _select_patterns(text: str, held_out: bool) -> tuple[str, ...]:
    variants: list[str] = []
    for line in text.replace(f"|{_HELD_OUT_MARK}", f"\n{_HELD_OUT_MARK}").strip().splitlines():
        if line.startswith(_HELD_OUT_MARK) is held_out:
            variants += _variants(line.removeprefix(_HELD_OUT_MARK))
    return tuple(variants)


@cache
def _words_for(style: Style | None) -> Mapping[str, tuple[str, ...]]:
    words = _words()
    if style is None:
        return words
    if style in _MANNER:
        return words | {slot: words[name] for slot, name in _MANNER[style].items()}
    return words | {"X": words[style], "Y": words[other(style)]}


@cache
def _words() -> dict[str, tuple[str, ...]]:
    """Return the variants of each word that stands in a pattern."""
    texts: dict[str, str] = _table("english")["words"] | _table("other_languages")["words"]
    return {name: _variants(text) for name, text in texts.items()}


def _variants(text: str) -> tuple[str, ...]:
    """Split a text into its variants, which are separated by "|" and line ends."""
    return tuple(part.strip() for line in text.strip().splitlines() for part in line.split("|") if part.strip())


@cache
def _table(name: str) -> dict[str, Any]:
    file = Path(__file__).parent / "words" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _gibberish(rng: random.Random) -> str:
    letters = rng.choice(("asdfghjkl", "qwertzuiop", "abcdefghijklmnopqrstuvwxyz", "xyz", "0123456789", "?.!-"))
    words = ("".join(rng.choice(letters) for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(1, 3)))
    return " ".join(words)


def _add_typo(text: str, rng: random.Random) -> str:
    """Omit, repeat, swap or replace one letter."""
    positions = [at for at in range(1, len(text)) if text[at].isalpha() and text[at].isascii()]
    if len(positions) < 3:
        return text
    at = rng.choice(positions)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at] * rng.randint(2, 4) + text[at + 1 :]
    if kind == 2:
        return text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]
    return text[:at] + _NEIGHBOURS.get(text[at].lower(), text[at]) + text[at + 1 :]
