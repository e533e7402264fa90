"""What a demo found: one record for each run, their summary, as JSON and as rows for a README.

Knows nothing about how it was measured. DESIGN section 12 says what every figure means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from clawloop.demo.plan import PlannedRun

GOAL = 0.9
"""The match a run is to reach."""


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
    """

    step: int
    version: int
    interactions: int
    reward: float | None
    match: float
    exact: float
    failed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, as it stands in `demo-report.json`.

    Args:
        interactions: user requests that may be learned from.
        interactions_to_90: their count at the first evaluation that reached the goal; None if none did.
        exact_rate: share of right content at the last evaluation.
        requests_failed: HTTP answers of 400 and above, and broken streams, before any retry.
        versions: that were made; steps: in which turns were trained.
        seconds: from the first request until nothing was left to learn.
        seconds_setup: before it: environment, if it was set up, and start of all parts.
    """

    seed: int
    method: str
    interactions: int
    match_before: float
    match_after: float
    interactions_to_90: int | None
    exact_rate: float
    requests_failed: int
    versions: int
    steps: int
    seconds: float
    seconds_setup: float


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What a run comes to in the end, after the last evaluation.

    Args:
        failed: requests failed; versions: that were made; steps: in which turns were trained.
        seconds: since the run began.
    """

    interactions: int
    failed: int
    versions: int
    steps: int
    seconds: float


def report_run(run: PlannedRun, evaluated: Sequence[Evaluated], totals: RunTotals, seconds_setup: float) -> RunReport:
    """
    Args:
        evaluated: in order; the first is of version 0.
    """
    first, last = evaluated[0], evaluated[-1]
    return RunReport(
        seed=run.seed,
        method=run.method.value,
        interactions=totals.interactions,
        match_before=round(first.match, 3),
        match_after=round(last.match, 3),
        interactions_to_90=next((one.interactions for one in evaluated if one.match >= GOAL), None),
        exact_rate=round(last.exact, 3),
        requests_failed=totals.failed,
        versions=totals.versions,
        steps=totals.steps,
        seconds=round(totals.seconds, 1),
        seconds_setup=round(seconds_setup, 1),
    )


def as_json(runs: Sequence[RunReport], seconds: float) -> str:
    """`demo-report.json`.

    Args:
        seconds: of all of it, setting up included.
    """
    rows = [asdict(run) for run in runs]
    reached = [run.interactions_to_90 for run in runs if run.interactions_to_90 is not None]
    summary = {
        "runs": len(runs),
        "reached_90": len(reached),
        "match_before": round(fmean(run.match_before for run in runs), 3),
        "match_after": round(fmean(run.match_after for run in runs), 3),
        "interactions_to_90_median": median(reached) if reached else None,
        "exact_rate_least": min(run.exact_rate for run in runs),
        "requests_failed": sum(run.requests_failed for run in runs),
        "seconds": round(seconds, 1),
        "seconds_setup": runs[0].seconds_setup,
    }
    top = rows[0] if len(rows) == 1 else {}
    return json.dumps({**top, "runs": rows, "summary": summary}, indent=2) + "\n"


def in_one_line(runs: Sequence[RunReport], seconds: float) -> str:
    """What the demo says at its end."""
    failed = sum(run.requests_failed for run in runs)
    if len(runs) == 1:
        (run,) = runs
        when = f"90 % after {run.interactions_to_90}" if run.interactions_to_90 is not None else "90 % not reached"
        said = f"match {run.match_before:.0%} → {run.match_after:.0%} in {run.interactions} interactions, {when}"
    else:
        reached = sum(run.interactions_to_90 is not None for run in runs)
        before, after = fmean(run.match_before for run in runs), fmean(run.match_after for run in runs)
        said = f"{reached} of {len(runs)} runs reached 90 %, match {before:.0%} → {after:.0%} on average"
    exact = min(run.exact_rate for run in runs)
    return (
        f"{said}; right content {exact:.0%}; requests failed: {failed};"
        f" {seconds:.0f} s in all, {runs[0].seconds_setup:.0f} s of them setting up"
    )


def as_markdown(runs: Sequence[RunReport]) -> str:
    """One row for each run."""
    head = ["seed", "method", "interactions", "match before", "match after", "90 % after", "right content"]
    head += ["requests failed", "versions", "seconds"]
    lines = [_row(head), _row(["---"] * len(head))]
    for run in runs:
        cells = [str(run.seed), run.method, str(run.interactions), f"{run.match_before:.0%}", f"{run.match_after:.0%}"]
        cells += ["–" if run.interactions_to_90 is None else str(run.interactions_to_90), f"{run.exact_rate:.0%}"]
        cells += [str(run.requests_failed), str(run.versions), f"{run.seconds:.0f}"]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
