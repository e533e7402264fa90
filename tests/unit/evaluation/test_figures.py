"""The yardstick's figures: three in a row, luck against a simulation, intervals, and which users count."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from clawloop.app.evaluation import figures
from clawloop.app.evaluation.figures import (
    Estimate,
    RunFigure,
    is_counted,
    sessions_by_luck,
    sessions_until,
    shown_table,
    table,
)

YES, NO = True, False


@pytest.mark.parametrize(
    ("met", "sessions"),
    [
        ([], None),
        ([YES, YES], None),
        ([YES, YES, YES], 3),
        ([YES, YES, NO, YES, YES, NO], None),
        ([NO, YES, YES, NO, YES, YES, YES, NO], 7),
        ([YES, YES, YES, YES, YES, YES], 3),
    ],
)
def test_sessions_are_counted_up_to_the_third_in_a_row(met: list[bool], sessions: int | None) -> None:
    assert sessions_until(met) == sessions


@pytest.mark.parametrize("rate", [0.2, 0.3, 0.5, 0.8, 0.95])
def test_luck_is_what_a_simulation_needs(rate: float) -> None:
    rng = random.Random(f"luck {rate}")

    def one() -> int:
        sessions = in_a_row = 0
        while in_a_row < 3:
            sessions, in_a_row = sessions + 1, in_a_row + 1 if rng.random() < rate else 0
        return sessions

    runs = 20_000
    drawn = [one() for _ in range(runs)]
    by_formula = sessions_by_luck(rate)
    assert by_formula is not None
    assert by_formula == pytest.approx((1 - rate**3) / (rate**3 * (1 - rate)))
    spread = math.sqrt(fmean((one - by_formula) ** 2 for one in drawn) / runs)
    assert abs(fmean(drawn) - by_formula) < 4 * spread


def test_luck_at_its_ends() -> None:
    assert (sessions_by_luck(1.0), sessions_by_luck(0.0)) == (3.0, None)


@pytest.mark.parametrize(("rate", "counts"), [(None, False), (0.0, True), (0.3, True), (0.31, False), (1.0, False)])
def test_users_of_whom_luck_is_soon_content_do_not_count(rate: float | None, counts: bool) -> None:
    assert is_counted(rate) is counts


@pytest.mark.parametrize("degrees", range(1, 30))
def test_the_quantiles_are_students(degrees: int) -> None:
    quantile = figures._T[degrees - 1]
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    steps = 20_000
    width = quantile / steps
    inside = sum(
        scale * (1 + ((at + 0.5) * width) ** 2 / degrees) ** (-(degrees + 1) / 2) * width for at in range(steps)
    )
    assert 0.5 + inside == pytest.approx(0.975, abs=5e-5)


def test_an_interval_is_over_seeds() -> None:
    assert Estimate.of([]) is None
    assert Estimate.of([7.0]) == Estimate(7.0, None, None, 1)
    found = Estimate.of([8.0, 10.0, 12.0])  # half: 4.303 * 2 / sqrt(3)
    assert found is not None
    assert (found.mean, found.count) == (10.0, 3)
    assert found.low == pytest.approx(10 - 4.9687, abs=1e-3)
    assert found.shown() == "10.0 (5.0 to 15.0)"


def test_the_table_has_each_user_and_a_row_of_those_that_count() -> None:
    runs = [
        RunFigure("hybrid", "student", 0, 4, True, 0.9),
        RunFigure("hybrid", "student", 1, 6, True, 1.0),
        RunFigure("hybrid", "teacher", 0, 10, True, 0.7),
        RunFigure("hybrid", "teacher", 1, 72, False, 0.8),
        RunFigure("hybrid", "assistant", 0, 3, True, 1.0),
        RunFigure("notes", "student", 0, 9, True),
    ]
    rates = {"student": 0.0, "teacher": 0.25, "assistant": 0.8}
    found = table(runs, ["notes", "hybrid"], ["student", "assistant", "teacher"], rates)
    assert [(row.arm, row.user, row.counted, row.reached, row.runs) for row in found] == [
        ("notes", "student", True, 1, 1),
        ("notes", "assistant", False, 0, 0),
        ("notes", "teacher", True, 0, 0),
        ("notes", None, True, 0, 0),  # the teacher's run of this seed is not finished
        ("hybrid", "student", True, 2, 2),
        ("hybrid", "assistant", False, 1, 1),
        ("hybrid", "teacher", True, 1, 2),
        ("hybrid", None, True, 3, 4),
    ]
    everyone = found[-1].sessions
    assert everyone is not None
    assert (everyone.mean, everyone.count) == (fmean([7, 39]), 2)
    assert found[-1].facts is not None
    assert found[-1].facts.mean == pytest.approx(0.85)

    cells = shown_table(found)
    assert [row["sessions to three"].split(" (")[0] for row in cells] == [
        "9.0", "not finished", "not finished", "not finished", "5.0", "3.0", "≥ 41.0", "≥ 23.0",
    ]  # fmt: skip
    assert [row["luck alone"] for row in cells[:4]] == ["never", "4.8", "84.0", ""]
    assert [row["counts"] for row in cells[:4]] == ["yes", "no", "yes", ""]
