"""Feedback in wordings that neither the demo's model nor its judge was trained on.

A third each: held-out phrases of taught sentence patterns, phrases of held-out patterns, and handwritten ones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeAlias

from clawloop.demo.phrasing import (
    MEASURED_PHRASES,
    Feedback,
    Mood,
    Typist,
    handwritten_phrases,
    held_out_phrases,
)
from clawloop.demo.world import Style

_Lists: TypeAlias = Mapping[tuple[Mood, Style | None], Sequence[Feedback]]


class UnseenTypist:
    """A generator of feedback like `phrasing.Typist`, of nothing that training has."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._phrases = Typist(rng, "phrase")

    def feedback(self, mood: Mood, style: Style | None = None) -> Feedback:
        """Return feedback; with WISHED it requests `style`."""
        lists = (None, *_lists())
        chosen = self._rng.choice(lists)
        if chosen is None:
            return self._phrases.feedback(mood, style)
        return self._rng.choice(chosen[mood, style if mood is Mood.WISHED else None])


@cache
def _lists() -> tuple[_Lists, ...]:
    return _by_kind(held_out_phrases("pattern", MEASURED_PHRASES)), _by_kind(handwritten_phrases())


def _by_kind(phrases: Sequence[Feedback]) -> _Lists:
    found: dict[tuple[Mood, Style | None], list[Feedback]] = defaultdict(list)
    for feedback in phrases:
        found[feedback.mood, feedback.style].append(feedback)
    return found
