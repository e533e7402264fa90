"""Advantages of the episodes of one rollout group: k attempts at one task, compared with each other.

GRPO with the reward of the whole attempt (outcome supervision, arXiv 2402.03300): each token of each turn of episode i
has the advantage Â_i = (R_i − mean R) / std R, over the episodes that have a reward, with the population's std. Plain
Python without torch. An episode without a reward has none: it is not a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from clawloop.algorithms.rewards import group_advantages


def needed_rewards(size: int) -> int:
    """The least number of episodes with a reward by which a group of `size` is settled: max(2, ⌈size/2⌉)."""
    return max(2, math.ceil(size / 2))


def episode_advantages(rewards: Sequence[float | None]) -> tuple[float | None, ...] | None:
    """Â of each episode, the same for all its turns; None where the episode gives no sample.

    An episode with exactly the mean reward gives none: its gradient is 0. A group of equal rewards gives no sample at
    all.

    Args:
        rewards: R of each episode of the group; None without one.

    Returns:
        None if too few episodes have a reward to compare them: the group is dropped.

    Raises:
        StreamsUnusable: a reward is not finite.
    """
    if sum(reward is not None for reward in rewards) < needed_rewards(len(rewards)):
        return None
    return tuple(advantage or None for advantage in group_advantages(rewards))


def step_advantages(rewards: Sequence[Sequence[float] | None]) -> tuple[tuple[float | None, ...], ...] | None:
    """Â of each turn, compared only with the turns of the other episodes at the same index (RLAnything, arXiv
    2602.02488: R_ij = O_i + (λ/m)·ΣS_ij, standardised per step index).

    An index that only one episode has reached has nothing to be compared with, and gives no sample.

    Args:
        rewards: R of each turn of each episode, in order; None for an episode without a reward.

    Returns:
        Per episode one per turn; None if too few episodes have a reward.

    Raises:
        StreamsUnusable: a reward is not finite.
    """
    known = [turns for turns in rewards if turns is not None]
    if len(known) < needed_rewards(len(rewards)):
        return None
    longest = max((len(turns) for turns in known), default=0)
    columns: list[tuple[float | None, ...]] = []
    for index in range(longest):
        column = [None if turns is None or index >= len(turns) else turns[index] for turns in rewards]
        alone = sum(reward is not None for reward in column) < 2
        columns.append(tuple(None for _ in column) if alone else group_advantages(column))
    return tuple(
        () if turns is None else tuple(columns[index][episode] or None for index in range(len(turns)))
        for episode, turns in enumerate(rewards)
    )
