"""The report of a demo of episodes: what it says of runs that reached the goal, lost it again, or never did."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from clawloop.app.demo.practice.report import (
    Measured,
    PracticeReport,
    Totals,
    lines,
    report_practice,
    write,
)
from clawloop.core.errors import SetupError

TOTALS = Totals(Counter({"completed": 90, "truncated_turns": 6}), lost=2, groups=12, groups_constant=3)


def report(*successes: float, stopped: str | None = None) -> PracticeReport:
    measured = [Measured(n, success, 60, 0, 32 * n, 30.0 * n) for n, success in enumerate(successes)]
    return report_practice(7, measured, TOTALS, seconds=300.0, seconds_setup=60.0, stopped=stopped)


def test_a_run_that_reaches_the_goal_and_falls_again_says_so() -> None:
    found = report(0.3, 0.5, 0.8, 0.6, 0.9)
    assert (found.success_before, found.success_after, found.gain, found.best) == (0.3, 0.9, 0.6, 0.9)
    assert (found.seconds_to_goal, found.least_after_goal) == (60.0, 0.6)
    assert (found.episodes, found.endings) == (96, {"completed": 90, "truncated_turns": 6})
    assert lines(found)[0] == (
        "seed 7: success on held-out tasks 30% → 90% (best 90%); 75% after 1.0 min, never below 60% after that"
    )


def test_a_run_that_never_reaches_the_goal_says_so() -> None:
    found = report(0.3, 0.4, 0.2, stopped="40 minutes are over")
    assert (found.seconds_to_goal, found.least_after_goal, found.gain) == (None, None, -0.1)
    assert lines(found)[0].endswith("75% not reached")
    assert lines(found)[-1] == "seed 7: ended early: 40 minutes are over"


def test_the_report_is_written_and_read_back(tmp_path: Path) -> None:
    write(tmp_path / "demo-x.json", [report(0.3, 0.8), report(0.2, 0.3)])
    written = json.loads((tmp_path / "demo-x.json").read_text())
    assert [run["gain"] for run in written["runs"]] == [0.5, 0.1]
    assert (written["summary"]["reached_goal"], written["summary"]["gain_least"]) == (1, 0.1)
    with pytest.raises(SetupError, match="choose another folder"):
        write(tmp_path / "none" / "demo-x.json", [report(0.3, 0.8)])
