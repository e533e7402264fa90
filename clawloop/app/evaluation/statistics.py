"""Means with confidence intervals, by bootstrap over tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """
    Args:
        mean: None without any value.
        low, high: 95 % interval.
        count: of values; one that a grader did not give is left out.
    """

    mean: float | None
    low: float | None
    high: float | None
    count: int


def estimate(values: Sequence[float | None], seed: str = "") -> Estimate:
    """The mean of the known values; the same values give the same interval."""
    known = [value for value in values if value is not None]
    if not known:
        return Estimate(None, None, None, 0)
    rng = random.Random(f"bootstrap {seed}")
    drawn = sorted(sum(rng.choices(known, k=len(known))) / len(known) for _ in range(_DRAWS))
    low, high = drawn[int(0.025 * _DRAWS)], drawn[int(0.975 * _DRAWS) - 1]
    return Estimate(sum(known) / len(known), low, high, len(known))


def change(before: Sequence[float | None], after: Sequence[float | None]) -> Estimate:
    """The mean change of tasks that were graded both times: paired, as both are answers to the same tasks."""
    pairs = zip(before, after, strict=True)
    return estimate([now - then for then, now in pairs if then is not None and now is not None], "change")
