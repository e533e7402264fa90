"""The at-least-one rule: a session that closes without a sample gets one, if one of its turns can give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.ids import TurnId

SMALLEST_EXPECTED = 0.05  # an expected score nearer to 0 says too little to make a sample of


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """A judged main turn of a closing session.

    Args:
        expected: expected score; None without a valid vote.
        trainable: the turn can be trained.
        sampled: the turn has a sample already, in any state but superseded.
    """

    turn_id: TurnId
    expected: float | None
    trainable: bool
    sampled: bool


@dataclass(frozen=True, slots=True)
class FallbackSample:
    """Result of the at-least-one rule at a session's first close.

    Args:
        turn_id, reward: the turn to sample and its reward; None if no sample is made.
        ask: turns that need a direct vote; then apply the rule again with `direct=True`.
        why: one line for people.
    """

    turn_id: TurnId | None
    reward: float | None
    ask: tuple[TurnId, ...]
    why: str


def at_least_one(turns: Sequence[JudgedTurn], *, direct: bool = False) -> FallbackSample:
    """The judged turn with the largest |expected score|, the first of equals, unless a turn has a sample already.

    Args:
        direct: the expected scores come from direct votes, so no direct vote is asked for.
    """
    if any(turn.sampled for turn in turns):
        return FallbackSample(None, None, (), "has a sample")
    scored = [
        (abs(turn.expected), turn.expected, turn.turn_id)
        for turn in turns
        if turn.trainable and turn.expected is not None
    ]
    if not scored:
        return FallbackSample(None, None, (), "no sample: no judged turn that can be trained")
    size, score, turn_id = max(scored, key=lambda candidate: candidate[0])
    if size == 0 and not direct:
        ask = tuple(candidate for _, _, candidate in scored)
        return FallbackSample(None, None, ask, "votes cancel out: direct vote asked for")
    if size < SMALLEST_EXPECTED:
        return FallbackSample(None, None, (), f"no sample: largest expected score is {score:+.2f}")
    return FallbackSample(turn_id, score, (), f"at least one: expected score {score:+.2f}")
