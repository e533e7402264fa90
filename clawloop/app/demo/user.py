"""The demo's synthetic user: a hidden preference, requests, and a reaction to each answer.

The same seed gives the same preference and the same draws, so two runs differ only by the model's answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from clawloop.app.demo.phrasing import Mood, UnseenTypist
from clawloop.app.demo.world import CHAT, Axis, Request, Style, draw_preference, grade

# Not every answer gets a reaction, and not every complaint gives a reason.
_SILENT_WHEN_PLEASED = 0.2
_SILENT_WHEN_DISPLEASED = 0.05
_COMPLAINT_WITHOUT_REASON = 0.15


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A user's next message.

    Args:
        text: the reaction, if any, and the next request.
        reaction: empty if the user does not react.
        request: the next request.
    """

    text: str
    reaction: str
    request: Request


class SyntheticUser:
    """A user with one preference for each axis.

    Args:
        seed: of the preference and of all draws.
        preference: overrides the preference of the seed.
    """

    def __init__(self, seed: int, preference: Mapping[Axis, Style] | None = None):
        self.preference: Mapping[Axis, Style] = draw_preference(seed) if preference is None else preference
        self._rng = random.Random(f"user {seed}")
        self._typist = UnseenTypist(random.Random(f"typist {seed}"))
        self._axes: list[Axis] = []

    def first_request(self) -> Request:
        """Return the first request of a session."""
        return self.next_request()

    def next_request(self) -> Request:
        """Return the next request; each axis is drawn equally often."""
        if not self._axes:
            self._axes = self._rng.sample(list(Axis), len(Axis))
        return self._rng.choice(CHAT[self._axes.pop()])

    def react(self, request: Request, answer: str) -> str:
        """Return the reaction to an answer; empty for none.

        A pleased user thanks or praises, a displeased one mostly names the preferred style. Wrong content gets a
        complaint that names no style.
        """
        graded = grade(request, answer, self.preference)
        draw = self._rng.random()
        if not graded.exact:
            return self._typist.feedback(Mood.DISLIKED).text
        if graded.match:
            return "" if draw < _SILENT_WHEN_PLEASED else self._typist.feedback(Mood.LIKED).text
        if draw < _SILENT_WHEN_DISPLEASED:
            return ""
        if draw < _SILENT_WHEN_DISPLEASED + _COMPLAINT_WITHOUT_REASON:
            return self._typist.feedback(Mood.DISLIKED).text
        return self._typist.feedback(Mood.WISHED, self.preference[request.axis]).text

    def follow_up(self, request: Request, answer: str) -> FollowUp:
        """Return the reaction and the next request as one message."""
        reaction, following = self.react(request, answer), self.next_request()
        return FollowUp(joined(reaction, following.text), reaction, following)


def joined(reaction: str, request: str) -> str:
    """Join a reaction and a request into one message."""
    return f"{reaction}\n{request}" if reaction else request
