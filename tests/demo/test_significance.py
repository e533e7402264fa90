"""The exact test of ranks, against published tables and counting by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from clawloop.app.demo.comparison import corrected, p_value, smallest_p_value


@pytest.mark.parametrize(
    ("some", "others", "chance"),
    [
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        # U = 2 for 5 and 5: the table's two-sided 0.032 (Mann and Whitney 1947, table I: 4 of 252 one-sided).
        ([1, 2, 3, 4, 7], [5, 6, 8, 9, 10], 8 / 252),
        ([1, 1, 1], [1, 1, 1], 1.0),
        ([30], [50], 1.0),
    ],
)
def test_p_values_match_published_tables(some: list[float], others: list[float], chance: float) -> None:
    assert p_value(some, others) == pytest.approx(chance)
    assert p_value(others, some) == pytest.approx(chance)


def test_ties_and_infinity_match_enumeration() -> None:
    chance = random.Random(5)
    for _ in range(20):
        values = [chance.choice([10.0, 20.0, 30.0, math.inf]) for _ in range(chance.randint(3, 9))]
        size = chance.randint(1, len(values) - 1)
        ranks = [sum(a < b for a in values) + (sum(a == b for a in values) + 1) / 2 for b in values]
        mean = size * (len(values) + 1) / 2
        seen = abs(sum(ranks[:size]) - mean)
        ways = list(itertools.combinations(ranks, size))
        far = sum(abs(sum(way) - mean) >= seen - 1e-9 for way in ways)
        assert p_value(values[:size], values[size:]) == pytest.approx(far / len(ways))


def test_a_hundred_runs_do_not_overflow() -> None:
    assert 0 < p_value(range(50), range(50, 100)) < 1e-20
    assert p_value(range(0, 100, 2), range(1, 101, 2)) > 0.5


@pytest.mark.parametrize(("some", "others", "chance"), [(1, 1, 1.0), (3, 3, 0.1), (5, 5, 2 / 252)])
def test_the_smallest_p_value_of_few_runs(some: int, others: int, chance: float) -> None:
    assert smallest_p_value(some, others) == pytest.approx(chance)


def test_holm_correction() -> None:
    assert corrected({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert corrected({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert corrected({"a": 0.04}) == {"a": 0.04}
