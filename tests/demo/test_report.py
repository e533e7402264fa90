"""The figures of `demo-report.json`, from evaluations made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clawloop.demo.chart import draw_chart
from clawloop.demo.plan import PlannedRun
from clawloop.demo.recipes import Method
from clawloop.demo.report import Evaluated, RunReport, RunTotals, as_json, as_markdown, in_one_line, report_run

RUN = PlannedRun(4, Method.OPD)
KEYS = ["seed", "method", "interactions", "match_before", "match_after", "interactions_to_90", "exact_rate"]
KEYS += ["requests_failed", "versions", "steps", "seconds", "seconds_setup"]


def evaluated(*matches: float) -> list[Evaluated]:
    """Version n after 8·n interactions."""
    return [
        Evaluated(
            step=n, version=n, interactions=8 * n, reward=None, match=match, exact=1.0, failed=n, seconds=10.0 * n
        )
        for n, match in enumerate(matches)
    ]


def report(*matches: float) -> RunReport:
    last = len(matches) - 1
    totals = RunTotals(interactions=8 * last + 3, failed=last, versions=last, steps=last, seconds=10.0 * last)
    return report_run(RUN, evaluated(*matches), totals, 50.0)


@pytest.mark.parametrize(
    ("matches", "to_90"),
    [
        ((0.5, 0.7, 0.9, 0.95), 16),
        ((0.5, 0.92, 0.8), 8),
        ((0.5, 0.7, 0.899), None),
        ((0.95,), 0),
    ],
)
def test_the_goal_is_reached_at_the_first_evaluation_of_at_least_90_percent(
    matches: tuple[float, ...], to_90: int | None
) -> None:
    assert report(*matches).interactions_to_90 == to_90


def test_match_is_of_the_first_and_last_evaluation_and_counts_are_of_the_whole_run() -> None:
    found = report(0.5, 0.8, 0.95)
    assert (found.match_before, found.match_after, found.versions, found.steps) == (0.5, 0.95, 2, 2)
    assert (found.interactions, found.requests_failed, found.seconds, found.seconds_setup) == (19, 2, 20.0, 50.0)


def test_one_run_also_stands_at_the_top() -> None:
    whole = json.loads(as_json([report(0.5, 0.95)], 99.0))
    assert [key for key in whole if key not in ("runs", "summary")] == KEYS
    assert whole["runs"] == [{key: whole[key] for key in KEYS}]
    assert whole["method"] == "opd"
    assert whole["summary"]["seconds"] == 99.0


def test_of_several_runs_the_summary_says_how_many_reached_the_goal() -> None:
    runs = [report(0.5, 0.95), report(0.4, 0.6), replace(report(0.6, 0.7, 0.9), exact_rate=0.9)]
    whole = json.loads(as_json(runs, 99.0))
    assert set(whole) == {"runs", "summary"}
    assert [list(run) for run in whole["runs"]] == [KEYS] * 3
    summary = whole["summary"]
    assert (summary["runs"], summary["reached_90"], summary["interactions_to_90_median"]) == (3, 2, 12)
    assert (summary["match_before"], summary["exact_rate_least"], summary["requests_failed"]) == (0.5, 0.9, 4)


def test_the_last_line_and_the_rows_say_the_same_to_people() -> None:
    one, other = report(0.5, 0.95), report(0.4, 0.6)
    assert in_one_line([one], 99.0) == (
        "match 50% → 95% in 11 interactions, 90 % after 8; right content 100%; requests failed: 1;"
        " 99 s in all, 50 s of them setting up"
    )
    assert in_one_line([one, other], 99.0).startswith("1 of 2 runs reached 90 %, match 45% → 77% on average")
    rows = as_markdown([one, other]).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert rows[2:] == [
        "| 4 | opd | 11 | 50% | 95% | 8 | 100% | 1 | 1 | 10 |",
        "| 4 | opd | 11 | 40% | 60% | – | 100% | 1 | 1 | 10 |",
    ]


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw_chart(tmp_path / "chart.png", {RUN: evaluated(0.5, 0.95), PlannedRun(5, Method.BINARY): evaluated(0.4)})
    content = (tmp_path / "chart.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000
