"""Agreement of two judges, with Cohen's kappa by hand."""

from __future__ import annotations

import pytest

from clawloop.core.judging.agreement import Cell, Pair, agreement, by_version


def pairs(*counts: tuple[int, int | None, int], version: int = 0) -> list[Pair]:
    return [Pair(version, before, after) for before, after, turns in counts for _ in range(turns)]


def test_agreement_beyond_chance() -> None:
    found = agreement(pairs((1, 1, 20), (1, -1, 5), (-1, 1, 10), (-1, -1, 15)))
    # 35 of 50 agree; by chance 0.5·0.6 + 0.5·0.4 = 0.5 would.
    assert (found.turns, found.agreed, found.share) == (50, 35, 0.7)
    assert found.kappa == pytest.approx(0.4)
    assert found.cells == (Cell(1, 1, 20), Cell(1, -1, 5), Cell(-1, 1, 10), Cell(-1, -1, 15))


def test_a_missing_verdict_is_neither_agreement_nor_its_opposite() -> None:
    found = agreement(pairs((1, 1, 3), (0, 0, 1), (1, None, 4)))
    assert (found.turns, found.missing, found.share, found.kappa) == (8, 4, 1.0, 1.0)


@pytest.mark.parametrize("listed", [[], pairs((1, None, 2)), pairs((1, 1, 5))])
def test_where_kappa_means_nothing_it_is_not_known(listed: list[Pair]) -> None:
    assert agreement(listed).kappa is None


def test_each_version_has_its_own() -> None:
    found = by_version([*pairs((1, 1, 2), version=3), *pairs((1, 0, 1), version=0)])
    assert [(version, one.share) for version, one in found.items()] == [(0, 0.0), (3, 1.0)]
