"""From votes to a verdict.

Knows nothing about how the votes were asked for. Scores lie in [−1, 1]; a missing vote is None and counts
nowhere, neither as a zero nor in a mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawloop.errors import EngineAnswerUnusable
from clawloop.judging.parsing import Vote

_TIE = 1e-9  # probabilities closer than this are equal: they come from float32 log-probs


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is held of a turn.

    Args:
        verdict: −1, 0 or 1; None if there is no valid vote.
        expected: mean of the valid votes, or of a direct vote's distribution; None with the verdict.
        reward: what a trained verdict is worth; the verdict itself, but the exact score of a rating.
        why: for people, e.g. "2 of 3 votes for -1".
    """

    verdict: Vote | None
    expected: float | None
    reward: float | None
    why: str


def signed(verdict: int) -> str:
    """A verdict for people: `+1`, `0` or `-1`."""
    return f"{verdict:+d}" if verdict else "0"


def majority(votes: Sequence[Vote | None]) -> Verdict:
    """The most frequent valid vote; a tie for the first place is 0; no valid vote is no verdict."""
    valid = [vote for vote in votes if vote is not None]
    if not valid:
        return Verdict(None, None, None, "no valid vote")
    expected = sum(valid) / len(valid)
    (leader, most), *others = Counter(valid).most_common()
    missing = f", {len(votes) - len(valid)} missing" if len(valid) < len(votes) else ""
    if others and others[0][1] == most:
        return Verdict(0, expected, 0.0, f"vote tie{missing}")
    return Verdict(leader, expected, float(leader), f"{most} of {len(valid)} votes for {leader}{missing}")


def direct_vote(logprobs: Mapping[Vote, float]) -> Verdict:
    """The verdict a constrained answer's distribution gives: its likeliest choice; a tie is 0.

    Args:
        logprobs: of each of the three choices at temperature 1. They are renormalised, which gives the same
            whether the engine reports them before or after its grammar masked everything else.

    Raises:
        EngineAnswerUnusable: a choice is missing, or the numbers are no distribution.
    """
    if set(logprobs) != {-1, 0, 1}:
        raise EngineAnswerUnusable(f"a direct vote needs log-probs of -1, 0 and 1, not of {sorted(logprobs)}")
    peak = max(logprobs.values())
    if not all(value <= 0.001 for value in logprobs.values()) or not math.isfinite(peak):
        raise EngineAnswerUnusable(f"not log-probs: {dict(logprobs)}")
    weights: dict[Vote, float] = {choice: math.exp(value - peak) for choice, value in logprobs.items()}
    mass = sum(weights.values())
    expected = (weights[1] - weights[-1]) / mass
    leaders = [choice for choice, weight in weights.items() if weight / mass > 1 / mass - _TIE]
    leader: Vote = leaders[0] if len(leaders) == 1 else 0
    return Verdict(leader, expected, float(leader), f"direct vote {expected:+.2f}")


def choice_logprobs(first_token: Mapping[str, float]) -> dict[Vote, float] | None:
    """Log-probs of the three choices from those of the first token of a GRAMMAR answer.

    Most tokenizers write "-1" as two tokens, so a first token "-" stands for −1; where both spellings are
    reported their probabilities add up. None if the engine did not report all three choices.
    """
    spellings: dict[Vote, tuple[str, ...]] = {1: ("1",), 0: ("0",), -1: ("-", "-1")}
    found: dict[Vote, float] = {}
    for choice, texts in spellings.items():
        known = [first_token[text] for text in texts if text in first_token]
        if not known:
            return None
        peak = max(known)
        found[choice] = peak + math.log(sum(math.exp(value - peak) for value in known)) if peak > -math.inf else peak
    return found


def rated(score: float) -> Verdict:
    """A user's explicit score is the verdict; no judge is asked.

    Raises:
        ValueError: the score is outside [−1, 1].
    """
    if not -1 <= score <= 1:
        raise ValueError(f"a score lies in [-1, 1], not {score}")
    verdict: Vote = 1 if score > 0 else -1 if score < 0 else 0
    return Verdict(verdict, float(score), float(score), f"rated {score:+.2f} by the user")
