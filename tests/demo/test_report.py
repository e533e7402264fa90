"""The figures of `demo-report.json`, from evaluations made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clawloop.app.demo.chart import draw_chart
from clawloop.app.demo.plan import Plan, PlannedRun
from clawloop.app.demo.recipes import Method
from clawloop.app.demo.report import Evaluation, RunReport, RunTotals, report_run
from clawloop.app.demo.report_formats import as_json, as_markdown, comparison_lines, read_report, summary_line
from clawloop.core.errors import SetupError

RUN = PlannedRun(4, Method.OPD)
PLAN = Plan((RUN,), 64, paced=True)
KEYS = ["seed", "method", "interactions", "match_before", "match_after", "interactions_to_90", "match_held"]
KEYS += ["exact_rate", "exact_least", "requests_failed", "versions", "steps", "seconds", "seconds_setup", "flipped_at"]
KEYS += ["relearned_after", "paced", "measure_every", "stopped", "faults", "rejected", "probed"]
KEYS += ["match_kept", "gave_up", "recorded", "model", "taste"]


def evaluated(*matches: float) -> list[Evaluation]:
    """Version n after 8·n interactions."""
    return [
        Evaluation(
            step=n, version=n, interactions=8 * n, reward=None, match=match, exact=1.0, failed=n, seconds=10.0 * n
        )
        for n, match in enumerate(matches)
    ]


def report(*matches: float) -> RunReport:
    last = len(matches) - 1
    totals = RunTotals(interactions=8 * last + 3, failed=last, versions=last, steps=last, seconds=10.0 * last)
    return report_run(PLAN, RUN, evaluated(*matches), totals, 50.0)


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


def test_a_single_run_is_also_at_the_top_level() -> None:
    whole = json.loads(as_json([report(0.5, 0.95)], 99.0))
    assert [key for key in whole if key not in ("runs", "summary")] == KEYS
    (run,) = whole["runs"]
    assert run.pop("evaluations")[1]["match"] == 0.95
    assert run == {key: whole[key] for key in KEYS}
    assert whole["method"] == "opd"
    assert whole["summary"]["seconds"] == 99.0


def test_the_summary_counts_the_runs_that_reached_the_goal() -> None:
    runs = [report(0.5, 0.95), report(0.4, 0.6), replace(report(0.6, 0.7, 0.9), exact_rate=0.9)]
    whole = json.loads(as_json(runs, 99.0))
    assert set(whole) == {"runs", "summary"}
    assert [list(run) for run in whole["runs"]] == [[*KEYS[:-2], "evaluations", *KEYS[-2:]]] * 3
    summary = whole["summary"]
    assert (summary["runs"], summary["reached_90"], summary["interactions_to_90_median"]) == (3, 2, 12)
    assert (summary["match_before"], summary["exact_rate_least"], summary["requests_failed"]) == (0.5, 0.9, 4)


def test_faults_are_counted() -> None:
    run = replace(report(0.5, 0.95), faults={"postgres": 2, "trainer": 1})
    whole = json.loads(as_json([run], 99.0))
    assert whole["faults"] == {"postgres": 2, "trainer": 1}
    assert whole["summary"]["faults"] == 3
    assert "requests failed: 1; while parts were killed 3 times; 99 s in all" in summary_line([run], 99.0)


def test_what_a_run_gave_up_is_in_its_report_and_in_the_summary() -> None:
    why = "gave up waiting after 300 s: waits for samples"
    totals = RunTotals(16, 0, 2, 2, 20.0, gave_up=why, recorded=15)
    run = report_run(PLAN, RUN, evaluated(0.5, 0.7, 0.9), totals, 50.0)
    whole = json.loads(as_json([run], 99.0))
    assert (whole["gave_up"], whole["recorded"]) == (why, 15)
    assert f"requests failed: 0; {why}; 99 s in all" in summary_line([run], 99.0)
    assert "requests failed: 1; 1 of the runs gave up waiting; 99 s" in summary_line([run, report(0.5, 0.95)], 99.0)


def test_summary_line_and_markdown_rows() -> None:
    one, other = report(0.5, 0.95), report(0.4, 0.6)
    assert summary_line([one], 99.0) == (
        "match 50% → 95% in 11 interactions, 90 % after 8; right content 100%; requests failed: 1;"
        " 99 s in all, 50 s of them setting up"
    )
    assert summary_line([one, other], 99.0).startswith("1 of 2 runs reached 90 %, match 45% → 77% on average")
    rows = as_markdown([one, other]).splitlines()
    assert rows[2] == "| opd | 1 of 2 | – (8 to –) | 45% | 78% | – | 100% | 1 | 11 | 2 | 10 | 0.91 |"
    assert len({row.count("|") for row in rows[-4:]}) == 1
    assert rows[-2:] == [
        "| 4 | opd | 11 | 50% | 95% | 8 | – | – | 100% | 1 | 1 | 10 |",
        "| 4 | opd | 11 | 40% | 60% | – | – | – | 100% | 1 | 1 | 10 |",
    ]


def test_the_chart_is_a_png(tmp_path: Path) -> None:
    one, other = report(0.5, 0.95), report(0.4, 0.6)
    for name, runs in (("one", [one]), ("several", [one, other, replace(one, method="binary", flipped_at=8)])):
        draw_chart(tmp_path / f"{name}.png", runs)
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


@pytest.mark.parametrize(
    ("matches", "held"),
    [
        ((0.5, 0.9, 0.94, 1.0, 0.94, 1.0, 0.7), 0.88),
        ((0.5, 0.9, 0.94, 1.0, 0.94), 0.96),
        ((0.5, 0.95, 1.0, 1.0), None),
        ((0.5, 0.7, 0.6, 0.5, 0.4), None),
    ],
)
def test_match_held_is_the_lowest_mean_of_three_in_a_row_after_the_goal(
    matches: tuple[float, ...], held: float | None
) -> None:
    assert report(*matches).match_held == held


@pytest.mark.parametrize(
    ("matches", "kept"),
    [
        ((0.5, 0.9, 0.91, 0.95, 0.96, 1.0, 1.0, 1.0), 0.97),  # 0.94 is on the way there
        ((0.5, 0.9, 1.0, 1.0, 1.0, 0.88, 0.91, 1.0), 0.93),
        ((0.5, 0.9, 0.91, 0.95, 0.96), None),
    ],
)
def test_match_kept_is_the_lowest_mean_once_a_mean_was_95_percent(
    matches: tuple[float, ...], kept: float | None
) -> None:
    assert report(*matches).match_kept == kept


def test_right_content_is_the_last_and_the_least() -> None:
    rows = [replace(row, exact=exact) for row, exact in zip(evaluated(0.5, 0.7, 0.9), (1.0, 0.9, 0.95), strict=True)]
    found = report_run(PLAN, RUN, rows, RunTotals(16, 0, 2, 2, 20.0), 50.0)
    assert (found.exact_rate, found.exact_least) == (0.95, 0.9)


@pytest.mark.parametrize(("after", "relearned"), [((0.3, 0.6, 0.9, 1.0), 16), ((0.3, 0.89), None), ((0.9,), 0)])
def test_relearned_after_counts_from_the_flip(after: tuple[float, ...], relearned: int | None) -> None:
    before = evaluated(0.5, 0.7, 0.89)
    rows = [*before, *(replace(row, interactions=16 + row.interactions, flipped=True) for row in evaluated(*after))]
    found = report_run(PLAN, RUN, rows, RunTotals(48, 0, 5, 5, 50.0, flipped_at=16), 50.0)
    assert (found.flipped_at, found.relearned_after) == (16, relearned)
    assert (found.interactions_to_90, found.match_held, found.match_after) == (None, None, after[-1])
    again = "not learned again" if relearned is None else f"learned again after {relearned};"
    assert f"90 % not reached, flipped at 16, {again}" in summary_line([found], 99.0)


def test_a_report_read_back_is_the_same(tmp_path: Path) -> None:
    runs = [report(0.5, 0.95, 0.934567), replace(report(0.4, 0.6), stopped="paused")]
    path = tmp_path / "demo-report.json"
    path.write_text(as_json(runs, 99.5))
    assert read_report(path) == (runs, 99.5)
    assert as_json(*read_report(path)) == path.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no demo-report.json"),
        ("[]", "is no demo-report.json"),
        (
            '{"runs": [{"seed": 1}], "summary": {"seconds": 1}}',
            "runs.0.method: Field required; is it of another release",
        ),
    ],
)
def test_an_invalid_report_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(SetupError, match=message):
        read_report(path)
    with pytest.raises(SetupError, match=r"missing\.json cannot be read: No such file"):
        read_report(tmp_path / "missing.json")


def test_comparison_lines_align_columns_and_list_differences() -> None:
    assert comparison_lines([report(0.5, 0.95)]) == []
    runs = [replace(report(0.5, 0.5 + seed / 100, 0.9), seed=seed, method="binary") for seed in range(5)]
    runs += [replace(report(0.5, 0.91 + seed / 100, 0.9), seed=seed, method="opd") for seed in range(5)]
    lines = comparison_lines(runs)
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[1].split()[:5] == ["binary", "5", "of", "5", "16"]
    assert lines[3] == "binary and opd, 90 % after: 16 and 8; more than noise (p = 0.008)"
    assert lines[4] == "binary and opd, match after: 90% and 90%; within noise (p = 1.000)"
    assert comparison_lines(runs[3:7])[-1] == "too few runs of each method to tell a difference from noise"
