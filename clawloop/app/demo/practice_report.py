"""The record of one run of a demo that learns from episodes, as written to `demo-NAME.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from clawloop.core.errors import SetupError

GOAL = 0.75
"""The success on held-out tasks that a run should reach."""
GAIN = 0.25
"""Improvement over the base model that a run should reach."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One version's attempts at the held-out tasks, one attempt each, sampled at temperature 1 as in rollouts.

    Args:
        success: share of the attempts with a reward that are right.
        attempts: with a reward; unknown: attempts without one, which count for nothing.
        episodes: finished episodes of the rollouts when the version was made.
        seconds: since rollouts began, when the version was made.
        after_run: measured once the run was over: the last one, and those that newer ones followed too quickly.
    """

    version: int
    success: float
    attempts: int
    unknown: int
    episodes: int
    seconds: float
    after_run: bool = False


@dataclass(frozen=True, slots=True)
class PracticeReport:
    """One run.

    Args:
        gain: success of the last measured version less that of version 0.
        best: highest success; least_after_goal: the lowest after the goal was reached, None if it was not.
        seconds_to_goal: when the first version that reached the goal was made; None if none did.
        endings: how often an episode of the rollouts ended so.
        lost: attempts that were tried again as another episode; they are not trained.
        groups: finished rollout groups; groups_constant: those of them whose episodes all had the same reward.
        seconds_setup: before rollouts began: starting all parts, and measuring version 0.
        stopped: why the run ended early; None if it did not.
    """

    seed: int
    success_before: float
    success_after: float
    gain: float
    best: float
    least_after_goal: float | None
    seconds_to_goal: float | None
    versions: int
    episodes: int
    endings: Mapping[str, int]
    lost: int
    groups: int
    groups_constant: int
    seconds: float
    seconds_setup: float
    stopped: str | None
    measured: Sequence[Measured]


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a run's episodes and groups; see `PracticeReport`."""

    endings: Counter[str]
    lost: int
    groups: int
    groups_constant: int


def report_practice(
    seed: int,
    measured: Sequence[Measured],
    totals: Totals,
    *,
    seconds: float,
    seconds_setup: float,
    stopped: str | None,
) -> PracticeReport:
    """
    Args:
        measured: in order; the first is of version 0.
    """
    return PracticeReport(
        seed=seed,
        **_learned(measured),
        episodes=totals.endings.total(),
        endings=dict(sorted(totals.endings.items())),
        lost=totals.lost,
        groups=totals.groups,
        groups_constant=totals.groups_constant,
        seconds=round(seconds, 1),
        seconds_setup=round(seconds_setup, 1),
        stopped=stopped,
    )


def with_measured(report: PracticeReport, measured: Sequence[Measured]) -> PracticeReport:
    """The report with these measurements instead of its own.

    Args:
        measured: in order; the first is of version 0.
    """
    return replace(report, **_learned(measured))


def _learned(measured: Sequence[Measured]) -> dict[str, Any]:
    before, after = measured[0].success, measured[-1].success
    reached = next((at for at, one in enumerate(measured) if one.success >= GOAL), None)
    return {
        "success_before": round(before, 3),
        "success_after": round(after, 3),
        "gain": round(after - before, 3),
        "best": round(max(one.success for one in measured), 3),
        "least_after_goal": None if reached is None else round(min(one.success for one in measured[reached:]), 3),
        "seconds_to_goal": None if reached is None else round(measured[reached].seconds, 1),
        "versions": measured[-1].version,
        "measured": tuple(measured),
    }


def as_json(reports: Sequence[PracticeReport]) -> str:
    summary = {
        "runs": len(reports),
        "reached_goal": sum(report.seconds_to_goal is not None for report in reports),
        "success_before": round(fmean(report.success_before for report in reports), 3),
        "success_after": round(fmean(report.success_after for report in reports), 3),
        "gain_least": min(report.gain for report in reports),
        "lost": sum(report.lost for report in reports),
    }
    return json.dumps({"runs": [asdict(report) for report in reports], "summary": summary}, indent=2) + "\n"


def lines(report: PracticeReport) -> list[str]:
    """The report for people."""
    reached = "not reached" if report.seconds_to_goal is None else f"after {report.seconds_to_goal / 60:.1f} min"
    least = "" if report.least_after_goal is None else f", never below {report.least_after_goal:.0%} after that"
    return [
        f"seed {report.seed}: success on held-out tasks {report.success_before:.0%} → {report.success_after:.0%} "
        f"(best {report.best:.0%}); {GOAL:.0%} {reached}{least}",
        f"seed {report.seed}: {report.versions} versions, {len(report.measured) - 1} of them measured; "
        f"{report.episodes} episodes in {report.groups} groups "
        f"({report.groups_constant} with equal rewards), {report.lost} lost, {report.seconds / 60:.1f} min "
        f"after {report.seconds_setup / 60:.1f} min of setting up",
        *([f"seed {report.seed}: ended early: {report.stopped}"] if report.stopped is not None else []),
    ]


def write(file: Path, reports: Sequence[PracticeReport]) -> None:
    """
    Raises:
        SetupError: the folder cannot be written to.
    """
    try:
        # Write to a new name first, so that an interrupted write keeps the previous report.
        new_file = file.with_name(f"{file.name}.new")
        new_file.write_text(as_json(reports), encoding="utf-8")
        new_file.replace(file)
    except OSError as error:
        raise SetupError(
            f"cannot write the report to {file.parent}: {error.strerror}; choose another folder: --out"
        ) from error
