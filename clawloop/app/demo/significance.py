"""The exact two-sided Mann-Whitney test with Holm's correction.

The distribution of ranks is enumerated, not approximated, because there are few runs and many ties
(https://doi.org/10.1214/aoms/1177730491).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import TypeVar

import numpy as np

SIGNIFICANT = 0.05
"""A difference with a p-value below this is more than noise."""

Name = TypeVar("Name")


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the exact p-value: the probability of rank sums at least this far apart under the null hypothesis.

    Args:
        first, second: at least one value each; infinity ranks above every number and ties with itself.
    """
    ranks = _doubled_ranks([*first, *second])
    middle = len(first) * (len(ranks) + 1)  # twice the expected sum of ranks
    counts = _sums(ranks, len(first))
    distances = np.abs(np.arange(len(counts)) - middle)
    at_least_as_far = distances >= abs(sum(ranks[: len(first)]) - middle)
    return float(counts[at_least_as_far].sum() / counts.sum())


def smallest_p_value(first: int, second: int) -> float:
    """Return the lowest `p_value` that samples of these sizes can have: that of two samples that do not overlap."""
    return min(1.0, 2 / comb(first + second, first))


def corrected(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Return the p-values corrected for multiple comparisons by Holm's step-down method (1979)."""
    corrected_values: dict[Name, float] = {}
    largest = 0.0
    for before, (name, p) in enumerate(sorted(p_values.items(), key=lambda one: one[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - before)))
        corrected_values[name] = largest
    return corrected_values


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value; ranks begin at 1, ties share their mean rank."""
    return [sum(other < value for other in values) + sum(other <= value for other in values) + 1 for value in values]


def _sums(ranks: Sequence[int], chosen: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return for each sum the number of subsets of `chosen` ranks with that sum: [sum of all ranks + 1]."""
    # ways[k, s] counts subsets of size k with sum s. Floats: for a hundred runs int64 would overflow.
    ways = np.zeros((chosen + 1, sum(ranks) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    counts: np.ndarray[tuple[int], np.dtype[np.float64]] = ways[chosen]
    return counts
