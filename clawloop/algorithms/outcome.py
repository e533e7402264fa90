"""Outcome and process together (RLAnything), and what they say about the judge.

Knows nothing about how votes are asked for or who says whether a task succeeded.
"""

from __future__ import annotations

import math


def process_reward(mean_vote: float, *, process_weight: float) -> float:
    """(λ/m)·ΣS_j of one turn.

    Args:
        mean_vote: of its valid votes, or of a direct vote's distribution.
        process_weight: λ.
    """
    return process_weight * mean_vote


def integrated_reward(outcome: int | None, process: float | None) -> float | None:
    """R = O + (λ/m)·ΣS_j of one turn, of the terms that are known.

    Args:
        outcome: whether the task as a whole succeeded, 1 or −1; None if nobody said.
        process: `process_reward`; None if there is no valid vote.

    Returns:
        None if neither is known.
    """
    if outcome is None:
        return process
    return outcome + (process or 0.0)


def judge_consistency(reward: float, mean_vote: float) -> float:
    """R·S, what the judge earns: for one vote, or for each of a turn's votes on average.

    Negative when it said the opposite of what came out.
    """
    return reward * mean_vote


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
