"""Summarises the runs of each method and tests whether the methods differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from clawloop.app.demo.report import Evaluation, RunReport

TEST = "Mann-Whitney, exact, two-sided; p of each figure by Holm's correction for all pairs of methods"
BAND = "the least and the most of the runs"


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of one figure over the runs of a method.

    Args:
        median: None if half of the runs or more have no value: they never reached the goal.
        least, most: None if that run never reached the goal.
        known: runs that reached it.
    """

    median: float | None
    least: float | None
    most: float | None
    known: int


@dataclass(frozen=True, slots=True)
class Point:
    """Mean and band of the runs' latest evaluations at a number of interactions."""

    interactions: int
    match: float
    match_least: float
    match_most: float
    steps: float


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """The figures of one method over its runs.

    Args:
        match_before, match_after: means over the runs.
        match_held: the lowest of all runs; None if no run has enough evaluations.
        exact_least: the lowest of all evaluations in all runs.
        steps, seconds: medians over the runs; seconds_per_interaction: over all runs together.
        relearned_after: None without a flip.
        stopped: runs that ended early.
    """

    runs: int
    stopped: int
    interactions: int
    interactions_to_90: Spread
    match_before: float
    match_after: float
    match_held: float | None
    exact_least: float
    steps: float
    seconds: float
    seconds_per_interaction: float
    requests_failed: int
    relearned_after: Spread | None
    curve: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of two methods in one figure.

    Args:
        of: the figure; between: the methods.
        medians: None where half of the runs or more never reached the goal.
        p: corrected for multiple comparisons; None if there are too few runs for any p below the threshold.
        within_noise: None if there are too few runs.
    """

    of: str
    between: tuple[str, str]
    medians: tuple[float | None, float | None]
    p: float | None
    within_noise: bool | None


def summarise(runs: Sequence[RunReport]) -> dict[str, MethodSummary]:
    """Return the summary of each method, in order of first appearance."""
    return {method: _summary(method_runs) for method, method_runs in _by_method(runs).items()}


def differences(runs: Sequence[RunReport]) -> list[Difference]:
    """Compare all pairs of methods in each figure; empty for one method."""
    runs_by_method = _by_method(runs)
    compared = {}
    for name, figure in _COMPARED.items():
        known = [figure(run) is not None for run in runs]
        # A run that never reached the goal ranks last; a figure that a run did not measure is not compared.
        if any(known) if name in _MISSING_RANKS_LAST else all(known):
            compared[name] = figure
    return [one for name, figure in compared.items() for one in _differences(name, figure, runs_by_method)]


def curve(runs: Sequence[RunReport]) -> tuple[Point, ...]:
    """Return one point for each number of interactions at which a run was evaluated, and one for the end."""
    counts = {one.interactions for run in runs for one in run.evaluations} | {max(run.interactions for run in runs)}
    points = []
    for count in sorted(counts):
        latest = [_latest_evaluation(run, count) for run in runs]
        matches = [evaluation.match for evaluation in latest]
        mean, steps = round(fmean(matches), 4), round(fmean(evaluation.step for evaluation in latest), 2)
        points.append(Point(count, mean, min(matches), max(matches), steps))
    return tuple(points)


def _latest_evaluation(run: RunReport, interactions: int) -> Evaluation:
    # Never empty: the first evaluation precedes the first interaction.
    return [one for one in run.evaluations if one.interactions <= interactions][-1]


def _summary(runs: Sequence[RunReport]) -> MethodSummary:
    held = [run.match_held for run in runs if run.match_held is not None]
    interactions = sum(run.interactions for run in runs)
    flipped = any(run.flipped_at is not None for run in runs)
    return MethodSummary(
        runs=len(runs),
        stopped=sum(run.stopped is not None for run in runs),
        interactions=max(run.interactions for run in runs),
        interactions_to_90=_spread([run.interactions_to_90 for run in runs]),
        match_before=round(fmean(run.match_before for run in runs), 3),
        match_after=round(fmean(run.match_after for run in runs), 3),
        match_held=min(held) if held else None,
        exact_least=min(run.exact_least for run in runs),
        steps=median(run.steps for run in runs),
        seconds=round(median(run.seconds for run in runs), 1),
        seconds_per_interaction=round(sum(run.seconds for run in runs) / interactions, 2),
        requests_failed=sum(run.requests_failed for run in runs),
        relearned_after=_spread([run.relearned_after for run in runs]) if flipped else None,
        curve=curve(runs),
    )


def _spread(figures: Sequence[float | None]) -> Spread:
    values = sorted(_none_to_infinity(figure) for figure in figures)
    known = sum(map(math.isfinite, values))
    return Spread(_infinity_to_none(median(values)), _infinity_to_none(values[0]), _infinity_to_none(values[-1]), known)


_COMPARED: Mapping[str, Callable[[RunReport], float | None]] = {
    "interactions_to_90": lambda run: run.interactions_to_90,
    "match_after": lambda run: run.match_after,
    "match_held": lambda run: run.match_held,
    "exact_least": lambda run: run.exact_least,
    "relearned_after": lambda run: run.relearned_after,
}
_MISSING_RANKS_LAST = ("interactions_to_90", "relearned_after")


def _differences(
    name: str, figure: Callable[[RunReport], float | None], runs_by_method: Mapping[str, Sequence[RunReport]]
) -> list[Difference]:
    values = {
        method: [_none_to_infinity(figure(run)) for run in method_runs]
        for method, method_runs in runs_by_method.items()
    }
    pairs = list(combinations(runs_by_method, 2))
    p_values = corrected({pair: p_value(values[pair[0]], values[pair[1]]) for pair in pairs})
    result = []
    for pair in pairs:
        sizes = [len(runs_by_method[method]) for method in pair]
        is_testable = smallest_p_value(*sizes) * len(pairs) < SIGNIFICANT
        p = round(p_values[pair], 4) if is_testable else None
        medians = (_infinity_to_none(median(values[pair[0]])), _infinity_to_none(median(values[pair[1]])))
        result.append(Difference(name, pair, medians, p, None if p is None else p >= SIGNIFICANT))
    return result


def _by_method(runs: Sequence[RunReport]) -> dict[str, list[RunReport]]:
    runs_by_method: dict[str, list[RunReport]] = {}
    for run in runs:
        runs_by_method.setdefault(run.method, []).append(run)
    return runs_by_method


def _none_to_infinity(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _infinity_to_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Significance ---------------------------------------------------------------------------------------------------------
# The exact two-sided Mann-Whitney test with Holm's correction. The distribution of ranks is enumerated, not
# approximated, because there are few runs and many ties (https://doi.org/10.1214/aoms/1177730491).

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
