"""Summaries and differences of methods, from handmade runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from clawloop.app.demo.comparison import Point, Spread, curve, differences, summarise
from clawloop.app.demo.report import RunReport
from tests.demo.test_report import report

FASTER = [30, 40, 40, 50, 30]
SLOWER = [60, 70, None, 90, 64]


def runs(method: str, to_90: Sequence[int | None]) -> list[RunReport]:
    return [
        replace(report(0.5, 0.95), seed=seed, method=method, interactions_to_90=at)
        for seed, at in enumerate(to_90, start=1)
    ]


def test_a_run_that_never_reached_the_goal_ranks_last_in_a_spread() -> None:
    found = summarise([*runs("binary", SLOWER), *runs("opd", [None, None, 30]), *runs("combined", [None])])
    assert list(found) == ["binary", "opd", "combined"]
    assert found["binary"].interactions_to_90 == Spread(median=70, least=60, most=None, known=4)
    assert found["opd"].interactions_to_90 == Spread(median=None, least=30, most=None, known=1)
    assert found["combined"].interactions_to_90 == Spread(median=None, least=None, most=None, known=0)


def test_a_summary_takes_the_worst_match_held_and_exact_least() -> None:
    some = [replace(run, exact_least=0.9 + run.seed / 100, match_held=0.99) for run in runs("opd", FASTER)]
    some[2] = replace(some[2], match_held=None, stopped="paused", steps=9, seconds=40.0)
    found = summarise(some)["opd"]
    assert (found.runs, found.stopped, found.match_held, found.exact_least) == (5, 1, 0.99, 0.91)
    assert (found.steps, found.seconds, found.seconds_per_interaction) == (1, 10.0, round(80 / 55, 2))
    assert found.relearned_after is None


def test_the_curve_uses_the_latest_evaluation() -> None:
    later = report(0.4, 0.6, 1.0)
    moved = tuple(replace(one, interactions=one.interactions + 4 * (one.version > 0)) for one in later.evaluations)
    found = curve([report(0.5, 0.9), replace(later, evaluations=moved)])
    assert found == (
        Point(0, 0.45, 0.4, 0.5, 0),
        Point(8, 0.65, 0.4, 0.9, 0.5),
        Point(12, 0.75, 0.6, 0.9, 1),
        Point(19, 0.75, 0.6, 0.9, 1),
        Point(20, 0.95, 0.9, 1.0, 1.5),
    )


def test_separated_samples_differ_and_equal_samples_do_not() -> None:
    found = {one.of: one for one in differences([*runs("binary", SLOWER), *runs("combined", FASTER)])}
    assert set(found) == {"interactions_to_90", "match_after", "exact_least"}
    faster = found["interactions_to_90"]
    assert (faster.between, faster.medians) == (("binary", "combined"), (70, 40))
    assert faster.p == pytest.approx(2 / 252, abs=1e-4)
    assert faster.within_noise is False
    assert (found["match_after"].p, found["match_after"].within_noise) == (1.0, True)


def test_p_values_of_three_pairs_are_corrected() -> None:
    three = [*runs("binary", SLOWER), *runs("combined", FASTER), *runs("opd", FASTER)]
    found = {one.between: one for one in differences(three) if one.of == "interactions_to_90"}
    assert found["binary", "combined"].p == pytest.approx(6 / 252, abs=1e-4)
    assert found["combined", "opd"].within_noise


@pytest.mark.parametrize("many", [1, 3])
def test_few_runs_have_no_p_value(many: int) -> None:
    found = differences([*runs("binary", SLOWER[:many]), *runs("combined", FASTER[:many])])
    assert {(one.p, one.within_noise) for one in found} == {(None, None)}


def test_a_single_method_has_no_differences() -> None:
    assert differences(runs("binary", SLOWER)) == []


def test_a_figure_missing_in_a_run_is_not_compared() -> None:
    held = [replace(run, match_held=0.97) for run in [*runs("binary", SLOWER), *runs("combined", FASTER)]]
    assert "match_held" in {one.of for one in differences(held)}
    held[0] = replace(held[0], match_held=None)
    assert "match_held" not in {one.of for one in differences(held)}
