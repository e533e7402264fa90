"""Whether the trained versions' replies are liked better than version 0's were.

A chat is one observation, the share of good ones among the good and bad verdicts on its replies: turns of a
conversation are not independent. The interval is that of Agresti and Caffo, "Simple and Effective Confidence Intervals
for Proportions" (2000): of two proportions with one success and one failure more in each, which holds with few
observations and where all agree. Shares between 0 and 1 vary less than it assumes. It is for people: a canary is
decided by another one, which may be looked at after each verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.core.contracts.answers import ReplyFigures
from clawloop.core.ids import SessionId

MIN_CHATS = 8
"""Fewest chats of either side; the intervals of fewer reach nearly from 0 to 1."""
NEWEST_CHATS = 50
"""Trained versions are known by so many of their newest chats: what they did long ago says little of today."""
REPLIES = 1000
"""Most replies of either side that are looked at."""
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Progress:
    """
    Args:
        chats, base_chats: judged chats with trained versions, and with version 0.
        share, base_share: of good verdicts, 0 to 1; None without a judged chat.
        low, high: 95 % interval of the change of the share; None with too few chats of either.
    """

    chats: int
    base_chats: int
    share: float | None
    base_share: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_better(self) -> bool | None:
        """None if that is not known."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return None
        return self.low > 0


def progress_of(base: Sequence[ReplyFigures], newest: Sequence[ReplyFigures]) -> Progress:
    """
    Args:
        base: replies of version 0.
        newest: the newest replies, oldest first; those of version 0 among them do not count.
    """
    before = _shares(base)
    now = _shares([reply for reply in newest if reply.version > 0])[-NEWEST_CHATS:]
    shares = _mean(now), _mean(before)
    if min(len(now), len(before)) < MIN_CHATS:
        return Progress(len(now), len(before), *shares)
    (new, new_variance), (old, old_variance) = _adjusted(now), _adjusted(before)
    radius = _Z * math.sqrt(new_variance + old_variance)
    low, high = max(-1.0, new - old - radius), min(1.0, new - old + radius)
    return Progress(len(now), len(before), *shares, low, high)


def _shares(replies: Sequence[ReplyFigures]) -> list[float]:
    """The share of good verdicts in each chat with a good or bad one, in the order of their last such replies."""
    verdicts: dict[SessionId, list[int]] = {}
    for reply in replies:
        if reply.verdict and not reply.in_episode:
            verdicts[reply.session_id] = [*verdicts.pop(reply.session_id, []), reply.verdict]
    return [of_chat.count(1) / len(of_chat) for of_chat in verdicts.values()]


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None


def _adjusted(shares: Sequence[float]) -> tuple[float, float]:
    """The proportion with one success and one failure more, and its variance."""
    count = len(shares) + 2
    proportion = (sum(shares) + 1) / count
    return proportion, proportion * (1 - proportion) / count
