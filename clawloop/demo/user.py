"""The demo's synthetic user: a hidden preference, requests, and a reaction typed after each answer.

Knows nothing about models, HTTP or sessions. The same seed gives the same preference and the same draws, so
two runs differ only by what the model answered.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from clawloop.demo.phrasing import Mood, Typist
from clawloop.demo.world import CHAT, Axis, Request, Style, draw_preference, grade

# People do not always say what they think: some go on without a word, some complain without saying why.
_SAYS_NOTHING_WHEN_PLEASED = 0.2
_SAYS_NOTHING_WHEN_NOT = 0.05
_COMPLAINS_WITHOUT_REASON = 0.15


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A user's next message.

    Args:
        text: the reaction, if there is one, and the next request.
        reaction: empty if the user goes on without a word.
        request: what is asked for next.
    """

    text: str
    reaction: str
    request: Request


class SyntheticUser:
    """A user with one preference for each axis.

    Args:
        seed: of the preference and of everything the user does.
        preference: instead of the one the seed gives.
    """

    def __init__(self, seed: int, preference: Mapping[Axis, Style] | None = None):
        self.preference: Mapping[Axis, Style] = draw_preference(seed) if preference is None else preference
        self._chance = random.Random(f"user {seed}")
        self._typist = Typist(random.Random(f"typist {seed}"))
        self._axes: list[Axis] = []

    def first_request(self) -> Request:
        """What the user asks for at the beginning of a session."""
        return self.next_request()

    def next_request(self) -> Request:
        """What the user asks for next; each axis comes up equally often."""
        if not self._axes:
            self._axes = self._chance.sample(list(Axis), len(Axis))
        return self._chance.choice(CHAT[self._axes.pop()])

    def react(self, request: Request, answer: str) -> str:
        """What the user types after an answer; empty if nothing.

        A pleased user thanks or praises. A displeased one mostly names what was wanted; where the content is
        wrong, only says so.
        """
        graded = grade(request, answer, self.preference)
        draw = self._chance.random()
        if not graded.exact:
            return self._typist.feedback(Mood.DISLIKED).text
        if graded.match:
            return "" if draw < _SAYS_NOTHING_WHEN_PLEASED else self._typist.feedback(Mood.LIKED).text
        if draw < _SAYS_NOTHING_WHEN_NOT:
            return ""
        if draw < _SAYS_NOTHING_WHEN_NOT + _COMPLAINS_WITHOUT_REASON:
            return self._typist.feedback(Mood.DISLIKED).text
        return self._typist.feedback(Mood.WISHED, self.preference[request.axis]).text

    def follow_up(self, request: Request, answer: str) -> FollowUp:
        """The reaction and the next request in one message."""
        reaction, following = self.react(request, answer), self.next_request()
        return FollowUp(joined(reaction, following.text), reaction, following)


def joined(reaction: str, request: str) -> str:
    """A reaction and a request as one message."""
    return f"{reaction}\n{request}" if reaction else request
