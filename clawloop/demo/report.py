"""What a demo found: one record for each run.

docs/demo.md defines each figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from clawloop.demo.plan import Plan, PlannedRun

GOAL = 0.9
"""The match a run is to reach."""
AT_A_TIME = 3
"""So many evaluations make a mean: one is of 60 sampled answers, and may be off by chance."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The fixed requests, asked of one version.

    Args:
        interactions: how many there had been.
        reward: mean verdict of the turns judged since the evaluation before; None if none was.
        match: share in the preferred style.
        exact: share with the right content.
        failed: requests failed so far.
        seconds: since the run began.
        flipped: by what the user likes after the flip.
    """

    step: int
    version: int
    interactions: int
    reward: float | None
    match: float
    exact: float
    failed: int
    seconds: float
    flipped: bool = False


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, as it stands in `demo-report.json`.

    Args:
        interactions: user requests that may be learned from.
        interactions_to_90: their count at the first evaluation that reached the goal; None if none did before the
            flip.
        match_held: the lowest mean match of three evaluations in a row after that one, before the flip; None if there
            were fewer.
        exact_rate: share of right content at the last evaluation; exact_least: at the worst one.
        requests_failed: HTTP answers of 400 and above, and broken streams, before any retry.
        versions: that were made; steps: in which turns were trained.
        seconds: from the first request until nothing was left to learn.
        seconds_setup: before it: environment, if it was set up, and start of all parts.
        flipped_at: interactions before the user came to like something else; None if the user did not.
        relearned_after: interactions from then until an evaluation reached the goal again; None if none did.
        paced, measure_every: as in `Plan`.
        stopped: why the run ended early; None if it did not.
        evaluations: all, in order; the first is of version 0.
    """

    seed: int
    method: str
    interactions: int
    match_before: float
    match_after: float
    interactions_to_90: int | None
    match_held: float | None
    exact_rate: float
    exact_least: float
    requests_failed: int
    versions: int
    steps: int
    seconds: float
    seconds_setup: float
    flipped_at: int | None
    relearned_after: int | None
    paced: bool
    measure_every: int
    stopped: str | None
    evaluations: tuple[Evaluated, ...]


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What a run comes to in the end, after the last evaluation.

    Args:
        failed: requests failed; versions: that were made; steps: in which turns were trained.
        seconds: since the run began.
        flipped_at: interactions before the flip; stopped: why it ended early. None if neither was.
    """

    interactions: int
    failed: int
    versions: int
    steps: int
    seconds: float
    flipped_at: int | None = None
    stopped: str | None = None


def report_run(
    plan: Plan, run: PlannedRun, evaluated: Sequence[Evaluated], totals: RunTotals, seconds_setup: float
) -> RunReport:
    """
    Args:
        evaluated: in order; the first is of version 0.
    """
    first, last = evaluated[0], evaluated[-1]
    before_flip = [one for one in evaluated if not one.flipped]
    again = _first([one for one in evaluated if one.flipped])
    return RunReport(
        seed=run.seed,
        method=run.method.value,
        interactions=totals.interactions,
        match_before=round(first.match, 3),
        match_after=round(last.match, 3),
        interactions_to_90=_first(before_flip),
        match_held=_held(before_flip),
        exact_rate=round(last.exact, 3),
        exact_least=round(min(one.exact for one in evaluated), 3),
        requests_failed=totals.failed,
        versions=totals.versions,
        steps=totals.steps,
        seconds=round(totals.seconds, 1),
        seconds_setup=round(seconds_setup, 1),
        flipped_at=totals.flipped_at,
        relearned_after=None if again is None or totals.flipped_at is None else again - totals.flipped_at,
        paced=plan.paced,
        measure_every=plan.measure_every,
        stopped=totals.stopped,
        evaluations=tuple(_rounded(one) for one in evaluated),
    )


def _first(evaluated: Sequence[Evaluated]) -> int | None:
    return next((one.interactions for one in evaluated if one.match >= GOAL), None)


def _held(evaluated: Sequence[Evaluated]) -> float | None:
    reached = next((at for at, one in enumerate(evaluated) if one.match >= GOAL), len(evaluated))
    after = [one.match for one in evaluated[reached + 1 :]]
    means = [fmean(after[at : at + AT_A_TIME]) for at in range(len(after) - AT_A_TIME + 1)]
    return round(min(means), 3) if means else None


def _rounded(one: Evaluated) -> Evaluated:
    reward = None if one.reward is None else round(one.reward, 3)
    return replace(
        one, reward=reward, match=round(one.match, 3), exact=round(one.exact, 3), seconds=round(one.seconds, 1)
    )
