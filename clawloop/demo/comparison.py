"""What several runs come to: a summary of each method, and which differences are more than noise.

Knows nothing about how runs are made or shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from clawloop.demo.report import Evaluated, RunReport
from clawloop.demo.significance import SIGNIFICANT, corrected, p_value, smallest_p_value

TEST = "Mann-Whitney, exact, two-sided; p of each figure by Holm's correction for all pairs of methods"
BAND = "the least and the most of the runs"


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the runs of a method.

    Args:
        median: None if half of the runs or more never got there.
        least, most: None if that run never got there.
        known: how many got there.
    """

    median: float | None
    least: float | None
    most: float | None
    known: int


@dataclass(frozen=True, slots=True)
class Point:
    """After so many interactions: the mean of the runs' newest evaluations until then, and their band."""

    interactions: int
    match: float
    match_least: float
    match_most: float
    steps: float


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """
    Args:
        match_before, match_after: mean of the runs.
        match_held: the lowest of the runs; None if none has enough evaluations.
        exact_least: the lowest of all evaluations of all runs.
        steps: median; seconds: median of a run; seconds_per_interaction: of all runs together.
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
    """Between two methods in one figure.

    Args:
        medians: None where half of the runs or more never got there.
        p: corrected; None if there are too few runs to tell any difference.
        within_noise: None if there are too few runs.
    """

    of: str
    between: tuple[str, str]
    medians: tuple[float | None, float | None]
    p: float | None
    within_noise: bool | None


def summarise(runs: Sequence[RunReport]) -> dict[str, MethodSummary]:
    """By method, in the order in which methods come first."""
    return {method: _summary(its) for method, its in _by_method(runs).items()}


def differences(runs: Sequence[RunReport]) -> list[Difference]:
    """Of each figure that is compared, between all pairs of methods; empty for one method."""
    lots = _by_method(runs)
    compared = {}
    for name, figure in _COMPARED.items():
        known = [figure(run) is not None for run in runs]
        # Who never got there is behind who did; but what was not measured cannot be compared.
        if any(known) if name in _NEVER_IS_LAST else all(known):
            compared[name] = figure
    return [one for name, figure in compared.items() for one in _differences(name, figure, lots)]


def curve(runs: Sequence[RunReport]) -> tuple[Point, ...]:
    """One point for each count of interactions at which any of the runs was measured, and for the end."""
    counts = {one.interactions for run in runs for one in run.evaluations} | {max(run.interactions for run in runs)}
    points = []
    for count in sorted(counts):
        now = [_newest(run, count) for run in runs]
        matches = [one.match for one in now]
        mean, steps = round(fmean(matches), 4), round(fmean(one.step for one in now), 2)
        points.append(Point(count, mean, min(matches), max(matches), steps))
    return tuple(points)


def _newest(run: RunReport, interactions: int) -> Evaluated:
    # The first evaluation is before the first interaction, so there always is one.
    return [one for one in run.evaluations if one.interactions <= interactions][-1]


def _summary(runs: Sequence[RunReport]) -> MethodSummary:
    held = [run.match_held for run in runs if run.match_held is not None]
    said = sum(run.interactions for run in runs)
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
        seconds_per_interaction=round(sum(run.seconds for run in runs) / said, 2),
        requests_failed=sum(run.requests_failed for run in runs),
        relearned_after=_spread([run.relearned_after for run in runs]) if flipped else None,
        curve=curve(runs),
    )


def _spread(found: Sequence[float | None]) -> Spread:
    values = sorted(_or_never(value) for value in found)
    known = sum(map(math.isfinite, values))
    return Spread(_known(median(values)), _known(values[0]), _known(values[-1]), known)


_COMPARED: Mapping[str, Callable[[RunReport], float | None]] = {
    "interactions_to_90": lambda run: run.interactions_to_90,
    "match_after": lambda run: run.match_after,
    "match_held": lambda run: run.match_held,
    "exact_least": lambda run: run.exact_least,
    "relearned_after": lambda run: run.relearned_after,
}
_NEVER_IS_LAST = ("interactions_to_90", "relearned_after")


def _differences(
    name: str, figure: Callable[[RunReport], float | None], lots: Mapping[str, Sequence[RunReport]]
) -> list[Difference]:
    values = {method: [_or_never(figure(run)) for run in its] for method, its in lots.items()}
    pairs = list(combinations(lots, 2))
    chances = corrected({pair: p_value(values[pair[0]], values[pair[1]]) for pair in pairs})
    found = []
    for pair in pairs:
        sizes = [len(lots[method]) for method in pair]
        can_tell = smallest_p_value(*sizes) * len(pairs) < SIGNIFICANT
        p = round(chances[pair], 4) if can_tell else None
        medians = (_known(median(values[pair[0]])), _known(median(values[pair[1]])))
        found.append(Difference(name, pair, medians, p, None if p is None else p >= SIGNIFICANT))
    return found


def _by_method(runs: Sequence[RunReport]) -> dict[str, list[RunReport]]:
    lots: dict[str, list[RunReport]] = {}
    for run in runs:
        lots.setdefault(run.method, []).append(run)
    return lots


def _or_never(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
