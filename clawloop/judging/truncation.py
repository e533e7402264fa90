"""Truncates long texts in the middle, and divides a budget of characters.

Budgets are in characters, because the judge's tokenizer is not known; a token is at least one character in nearly
every tokenizer, about four in English.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MARK = "\n[... {} characters cut ...]\n"
MARK_ROOM = len(_MARK.format(10**12))  # the longest mark: no text has 10^12 characters

SMALLEST_TOTAL = 600  # below this the smallest section has little room beside the mark of a cut


@dataclass(frozen=True, slots=True)
class Budgets:
    """Characters per section of a judge prompt; they add up to `total`.

    The default, 24,000 characters, is 6-8 thousand tokens of English: half a context of 16k, which leaves the other
    half for the judge's thinking.
    """

    task: int = 5_000
    history: int = 4_000
    reply: int = 6_000
    next: int = 7_000
    feedback: int = 2_000

    @property
    def total(self) -> int:
        return self.task + self.history + self.reply + self.next + self.feedback

    @classmethod
    def of(cls, total: int) -> Budgets:
        """Another total in the default proportions, for a judge with another context."""
        if total < SMALLEST_TOTAL:
            raise ValueError(f"a judge prompt needs at least {SMALLEST_TOTAL} characters, not {total}")
        default = cls()
        return cls(
            task=default.task * total // default.total,
            history=default.history * total // default.total,
            reply=default.reply * total // default.total,
            next=default.next * total // default.total,
            feedback=default.feedback * total // default.total,
        )


DEFAULT_BUDGETS = Budgets()


def cut_middle(text: str, limit: int) -> str:
    """`text` in at most `limit` characters: its beginning and end, and between them how many are cut.

    If the limit has no room for that mark, only the beginning is left.
    """
    if len(text) <= limit:
        return text
    room = limit - MARK_ROOM
    if room <= 0:
        return text[: max(limit, 0)]
    head = (room + 1) // 2
    tail = room - head
    return text[:head] + _MARK.format(len(text) - room) + text[len(text) - tail :]


def share(lengths: Sequence[int], budget: int) -> list[int]:
    """The part of `budget` for each text: short texts get all they need, long ones equal parts of the rest."""
    shares = [0] * len(lengths)
    left = budget
    waiting = sorted(range(len(lengths)), key=lambda index: lengths[index])
    while waiting:
        equal = left // len(waiting)
        index = waiting.pop(0)
        shares[index] = min(lengths[index], equal)
        left -= shares[index]
    return shares
