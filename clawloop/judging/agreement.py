"""Agreement of two judges on the same turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """Two verdicts on one turn.

    Args:
        version: the version that answered.
        before: the verdict that stands.
        after: the other one; None if there was no valid vote.
    """

    version: int
    before: int
    after: int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Number of turns with this pair of verdicts."""

    before: int
    after: int | None
    turns: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """
    Args:
        turns: with and without a new verdict.
        agreed: with the same verdict.
        missing: without a new verdict; they count neither way.
        share: agreed, of those that have one; None without any.
        kappa: Cohen's: 1 is full agreement, 0 what chance gives; None where one verdict is all there is.
        cells: how often each pair of verdicts occurs.
    """

    turns: int
    agreed: int
    missing: int
    share: float | None
    kappa: float | None
    cells: tuple[Cell, ...]


def agreement(pairs: Iterable[Pair]) -> Agreement:
    """The agreement over all these turns."""
    counts = Counter((pair.before, pair.after) for pair in pairs)
    voted = {(before, after): turns for (before, after), turns in counts.items() if after is not None}
    total, agreed = sum(voted.values()), sum(turns for (before, after), turns in voted.items() if before == after)
    by_before: Counter[int] = Counter()
    by_after: Counter[int] = Counter()
    for (before, after), turns in voted.items():
        by_before[before] += turns
        by_after[after] += turns
    share = agreed / total if total else None
    chance = sum(by_before[verdict] * by_after[verdict] for verdict in by_before) / total**2 if total else 1.0
    order = sorted(counts.items(), key=lambda item: (-item[0][0], item[0][1] is None, -(item[0][1] or 0)))
    return Agreement(
        turns=sum(counts.values()),
        agreed=agreed,
        missing=sum(counts.values()) - total,
        share=share,
        kappa=None if share is None or chance == 1.0 else (share - chance) / (1 - chance),
        cells=tuple(Cell(before, after, turns) for (before, after), turns in order),
    )


def by_version(pairs: Iterable[Pair]) -> dict[int, Agreement]:
    """The agreement on each version's replies, by version."""
    listed = list(pairs)
    versions = sorted({pair.version for pair in listed})
    return {version: agreement(pair for pair in listed if pair.version == version) for version in versions}
