"""Outcome and process together (RLAnything), and what they say about the judge.

Knows nothing about how votes are asked for or who says whether a task succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal[-1, 1]
Vote: TypeAlias = Literal[-1, 0, 1]


def integrated_reward(
    outcome: Outcome | None, votes: Sequence[Vote | None], *, process_weight: float = 1.0
) -> float | None:
    """R = O + (λ/m)·ΣS_j of one turn, of the terms that are known.

    Args:
        outcome: whether the task as a whole succeeded; None if nobody said.
        votes: of this turn; None for a vote that failed, which counts neither in the sum nor in m.
        process_weight: λ.

    Returns:
        None if neither is known.
    """
    valid = [vote for vote in votes if vote is not None]
    process = process_weight * sum(valid) / len(valid) if valid else None
    if outcome is None:
        return process
    return float(outcome) if process is None else outcome + process


def judge_consistency(reward: float, vote: Vote) -> float:
    """R·S: what the judge earns for one vote; negative when it said the opposite of what came out."""
    return reward * vote


def precision_bound(votes: int, *, true_positive_rate: float, true_negative_rate: float) -> float:
    """Least share of turns that m votes judge rightly: 1 − exp(−m(μ − 1)²/4), μ the sum of both rates.

    A judge no better than chance (μ ≤ 1) gains nothing by being asked more often: 0.

    Raises:
        ValueError: a rate outside 0..1, or a negative number of votes.
    """
    if votes < 0 or not (0 <= true_positive_rate <= 1 and 0 <= true_negative_rate <= 1):
        raise ValueError(f"{votes} votes at rates {true_positive_rate} and {true_negative_rate}")
    better = max(0.0, true_positive_rate + true_negative_rate - 1)
    return -math.expm1(-votes * better**2 / 4)
