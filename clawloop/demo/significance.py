"""Whether two lots of runs differ by more than chance would make them.

Knows nothing about demos. The test is Mann and Whitney's (1947), two-sided, of ranks, with its distribution counted
out and not approximated, because there are a handful of runs and many ties (https://doi.org/10.1214/aoms/1177730491).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import TypeVar

import numpy as np

SIGNIFICANT = 0.05
"""Below it a difference is more than noise."""

Name = TypeVar("Name")


def p_value(some: Sequence[float], others: Sequence[float]) -> float:
    """How often ranks at least as far apart would come from runs that do not differ: the exact p.

    Args:
        some, others: at least one each; infinity is above all and equal to itself.
    """
    ranks = _doubled_ranks([*some, *others])
    middle = len(some) * (len(ranks) + 1)  # twice the expected sum of ranks
    counted = _sums(ranks, len(some))
    apart = np.abs(np.arange(len(counted)) - middle)
    at_least = apart >= abs(sum(ranks[: len(some)]) - middle)
    return float(counted[at_least].sum() / counted.sum())


def smallest_p_value(some: int, others: int) -> float:
    """What `p_value` can be at the least for so many runs: when all of one lie beyond all of the other."""
    return min(1.0, 2 / comb(some + others, some))


def corrected(chances: Mapping[Name, float]) -> dict[Name, float]:
    """The chances, larger for being several: Holm's step-down correction (1979)."""
    found: dict[Name, float] = {}
    largest = 0.0
    for before, (name, chance) in enumerate(sorted(chances.items(), key=lambda one: one[1])):
        largest = max(largest, min(1.0, chance * (len(chances) - before)))
        found[name] = largest
    return found


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, from 1 up; equal ones share their mean rank."""
    return [sum(other < value for other in values) + sum(other <= value for other in values) + 1 for value in values]


def _sums(ranks: Sequence[int], chosen: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """In how many ways that many of the ranks have each sum: [sum of all ranks + 1]."""
    # ways[k, s] grows by one rank at a time; floats, because for a hundred runs whole numbers would overflow.
    ways = np.zeros((chosen + 1, sum(ranks) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = ways[chosen]
    return found
