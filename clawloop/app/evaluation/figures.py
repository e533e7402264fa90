"""Figures of the yardstick: sessions until three in a row, what luck alone needs, intervals, and the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

IN_A_ROW = 3
MOST_BASE_RATE = 0.3
"""A user whose rule the base model meets more often than this is shown and not counted: luck alone is soon there."""
INTERVAL = "95 % intervals: Student's t over seeds"
# Quantiles 0.975 of Student's t for 1 to 29 degrees of freedom.
# fmt: off
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)
# fmt: on
MOST_SEEDS = len(_T) + 1


def sessions_until(met: Sequence[bool]) -> int | None:
    """Number of sessions up to the third in a row that meets the rule; None if there is none."""
    return next((end for end in range(IN_A_ROW, len(met) + 1) if all(met[end - IN_A_ROW : end])), None)


def sessions_by_luck(rate: float) -> float | None:
    """Mean number of sessions until three in a row, if each meets the rule with this probability; None: never, at 0.

    (1 - p³) / (p³ (1 - p)), which is (1 + p + p²) / p³.
    """
    return None if rate == 0 else (1 + rate + rate**2) / rate**IN_A_ROW


def is_counted(base_rate: float | None) -> bool:
    """True if a user's sessions say something about learning; an unknown base rate says nothing yet."""
    return base_rate is not None and base_rate <= MOST_BASE_RATE


@dataclass(frozen=True, slots=True)
class Estimate:
    """
    Args:
        low, high: 95 % interval by Student's t; None for one value.
        count: number of seeds.
    """

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None without values.

        Args:
            values: one of each seed.
        """
        if not values:
            return None
        mean, count = fmean(values), len(values)
        if count == 1:
            return cls(mean, None, None, 1)
        half = _T[count - 2] * stdev(values) / math.sqrt(count)
        return cls(mean, mean - half, mean + half, count)

    def shown(self, digits: int = 1) -> str:
        """E.g. `12.4 (9.1 to 15.7)`."""
        if self.low is None or self.high is None:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class RunFigure:
    """One user's run in one arm with one seed, once it is finished.

    Args:
        sessions: until three in a row; the limit where that was not reached.
        facts: share of the facts that version 0 knows which are still answered rightly; None: not asked.
        lessons: in the prompt of the last session; None where none are made.
        tokens: of the prompt of each session's first request, in order; empty: not known.
    """

    arm: str
    user: str
    seed: int
    sessions: int
    reached: bool
    facts: float | None = None
    lessons: int | None = None
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """
    Args:
        user: None: all users that count.
        sessions: None before any run is finished.
        reached: of the runs, those that had three in a row within the limit.
        base_rate: of the base model without notes; None for all users, or before it was asked.
        luck: sessions that the base rate alone needs; None at a rate of 0, too.
        lessons: left in the prompt at the end; None where none are made.
        tokens: of the first request of a session: of the first one, of the one with most, and of the last; None: not
            known.
    """

    arm: str
    user: str | None
    counted: bool
    runs: int
    reached: int
    sessions: Estimate | None
    base_rate: float | None
    luck: float | None
    facts: Estimate | None
    lessons: Estimate | None = None
    tokens: tuple[float, float, float] | None = None


def table(
    runs: Sequence[RunFigure], arms: Sequence[str], users: Sequence[str], base_rates: Mapping[str, float]
) -> list[Row]:
    """A row for each arm and user, and below them one for all users that count.

    In the row for all, a seed's value is the mean over users, and only seeds that are finished for each of them count.
    """
    counted = [user for user in users if is_counted(base_rates.get(user))]
    rows = []
    for arm in arms:
        for user in users:
            own = [run for run in runs if (run.arm, run.user) == (arm, user)]
            rate = base_rates.get(user)
            luck = None if rate is None else sessions_by_luck(rate)
            rows.append(_row(arm, user, user in counted, [[run] for run in own], rate, luck))
        of_all = [run for run in runs if run.arm == arm and run.user in counted]
        by_seed = [[run for run in of_all if run.seed == seed] for seed in sorted({run.seed for run in of_all})]
        whole = [group for group in by_seed if len(group) == len(counted)]
        rows.append(_row(arm, None, bool(counted), whole, None, None))
    return rows


def _row(
    arm: str, user: str | None, counted: bool, by_seed: Sequence[Sequence[RunFigure]], rate: float | None,
    luck: float | None,
) -> Row:  # fmt: skip
    runs = [run for group in by_seed for run in group]
    facts = [[run.facts for run in group if run.facts is not None] for group in by_seed]
    lessons = [[run.lessons for run in group if run.lessons is not None] for group in by_seed]
    tokens = [run.tokens for run in runs if run.tokens]
    return Row(
        arm,
        user,
        counted,
        len(runs),
        sum(run.reached for run in runs),
        Estimate.of([fmean(run.sessions for run in group) for group in by_seed]),
        rate,
        luck,
        Estimate.of([fmean(group) for group in facts if group]),
        Estimate.of([fmean(group) for group in lessons if group]),
        _over_time(tokens),
    )


def _over_time(runs: Sequence[Sequence[int]]) -> tuple[float, float, float] | None:
    """The first, the largest and the last value of each run, as means over runs."""
    if not runs:
        return None
    return fmean(run[0] for run in runs), fmean(map(max, runs)), fmean(run[-1] for run in runs)


def shown_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The cells of the table, for people; sessions with a run that reached the limit are at least so many."""
    return [
        {
            "arm": row.arm,
            "user": "all that count" if row.user is None else row.user,
            "counts": "" if row.user is None else "yes" if row.counted else "no",
            "sessions to three": _at_least(row),
            "reached": f"{row.reached} of {row.runs}",
            "base rate": "" if row.base_rate is None else f"{row.base_rate:.1%}",
            "luck alone": _luck(row),
            "facts": "" if row.facts is None else row.facts.shown(2),
            "lessons left": "" if row.lessons is None else row.lessons.shown(),
            "prompt tokens: first, most, last": "" if row.tokens is None else ", ".join(f"{n:.0f}" for n in row.tokens),
        }
        for row in rows
    ]


def _at_least(row: Row) -> str:
    if row.sessions is None:
        return "not finished"
    return ("≥ " if row.reached < row.runs else "") + row.sessions.shown()


def _luck(row: Row) -> str:
    if row.luck is not None:
        return f"{row.luck:,.1f}"
    return "" if row.base_rate is None else "never"
