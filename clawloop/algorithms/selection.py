"""At least one: what a session gives that closes with judged turns but without a sample.

Knows nothing about sessions or votes. The caller asks once per session, at its first close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Below this the judge has no opinion, and its noise is not worth a place in a batch.
_LEAST_SCORE = 0.05


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One turn of the session.

    Args:
        expected: mean of its valid votes; None if it has none.
        direct: expected score by a direct vote; None if none was asked.
    """

    expected: float | None
    direct: float | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Index of the turn that becomes a sample, and its reward."""

    index: int
    reward: float


@dataclass(frozen=True, slots=True)
class NeedsDirectVotes:
    """The votes cancel out everywhere: ask directly for these turns, then ask again here."""

    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoSample:
    """The session gives none; shown to people."""

    reason: str


def at_least_one(turns: Sequence[JudgedTurn]) -> Chosen | NeedsDirectVotes | NoSample:
    """The judged turn with the largest |score|; of equals the latest, whose policy is nearest to today's."""
    judged = [index for index, turn in enumerate(turns) if turn.expected is not None]
    if not judged:
        return NoSample("nothing judged")
    scores = {index: turns[index].expected or 0.0 for index in judged}
    if not any(scores.values()):
        unasked = tuple(index for index in judged if turns[index].direct is None)
        if unasked:
            return NeedsDirectVotes(unasked)
        scores = {index: turns[index].direct or 0.0 for index in judged}
    best = max(judged, key=lambda index: (abs(scores[index]), index))
    if abs(scores[best]) < _LEAST_SCORE:
        return NoSample(f"no clear opinion: largest score {scores[best]:+.3f}")
    return Chosen(best, scores[best])
