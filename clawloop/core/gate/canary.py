"""The canary: whether a version that a share of the sessions gets is better, as good or worse than the one before.

Decided by an always-valid confidence sequence (the mixture sequential probability ratio test of Robbins, as Johari,
Pekelis and Walsh use it, "Always Valid Inference", 2015): it may be looked at after each verdict, and still calls at
most 5 % of the versions better or worse that are neither. One session is one observation, the mean verdict on its
turns: turns of a conversation are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawloop.core.contracts.training import CheckResult, GateCheck
from clawloop.core.recipes.recipe import Gate

MIN_SESSIONS = 8
"""Fewest sessions of the canary and of the others; the spread of fewer is unknown."""
MARGIN = 0.2
"""A canary is as good if its mean verdict is worse by less than this: one complaint more in ten turns."""
_ALPHA = 0.05
# The difference that the test is best at: one complaint more in four turns.
_TAU = 0.5


CANARY = "canary"


@dataclass(frozen=True, slots=True)
class JudgedSessions:
    """
    Args:
        canary, others: mean verdict of each session since the canary began, −1 to 1, of the canary and of the previous
            version.
        hours: since the canary began.
    """

    canary: Sequence[float]
    others: Sequence[float]
    hours: float


def check_canary(sessions: JudgedSessions, gate: Gate) -> GateCheck | None:
    """The decision about a canary; None while its sessions decide nothing and time is left.

    A canary that failed is worse, one that passed better or as good; with too little to decide by its time is over.
    """
    canary, others, limit_hours = sessions.canary, sessions.others, gate.canary_hours
    counts: dict[str, float | None] = {
        "sessions": len(canary),
        "other_sessions": len(others),
        "hours": sessions.hours,
    }
    is_over = sessions.hours >= limit_hours
    if min(len(canary), len(others)) < MIN_SESSIONS:
        if not is_over:
            return None
        lacking, _, words = traffic(len(canary), len(others)).partition(": ")
        reason = f"{lacking} in {limit_hours:g} h: {words}; it answers all from now on"
        return GateCheck(CANARY, CheckResult.NOT_ENOUGH, reason, counts)
    change, radius = _difference(canary, others)
    figures: Mapping[str, float | None] = {**counts, "change": change, "radius": radius}
    words = (
        f"mean verdict {change:+.2f} ± {radius:.2f} over {len(canary)} sessions and {len(others)} of the version before"
    )
    if change + radius < 0:
        return GateCheck(CANARY, CheckResult.FAILED, f"worse: {words}", figures)
    if change - radius > 0:
        return GateCheck(CANARY, CheckResult.PASSED, f"better: {words}", figures)
    if change - radius > -MARGIN:
        return GateCheck(CANARY, CheckResult.PASSED, f"as good: {words}", figures)
    if is_over:
        undecided = f"neither better nor worse within {limit_hours:g} h: {words}"
        return GateCheck(CANARY, CheckResult.NOT_ENOUGH, undecided, figures)
    return None


def traffic(canary: int, others: int) -> str:
    """Text with the judged sessions of a canary and of the previous version, and whether they are too few."""
    counts = f"{canary} judged sessions of the canary and {others} of the version before"
    if min(canary, others) >= MIN_SESSIONS:
        return counts
    return f"{'too little' if canary else 'no'} traffic: {counts}, {MIN_SESSIONS} of each are needed"


def version_for_all(head: int, pinned: int | None, canary_parent: int | None) -> int:
    """The version that should be active: a pinned one, else the parent of a canary, else the head.

    Args:
        canary_parent: None if there is no canary.
    """
    if pinned is not None:
        return pinned
    return head if canary_parent is None else canary_parent


def _difference(canary: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, and the radius of its confidence sequence."""
    variance = _variance(canary) / len(canary) + _variance(others) / len(others)
    mixed = variance + _TAU**2
    radius = math.sqrt(2 * variance * mixed / _TAU**2 * math.log(math.sqrt(mixed / variance) / _ALPHA))
    return sum(canary) / len(canary) - sum(others) / len(others), radius


def _variance(values: Sequence[float]) -> float:
    """Variance with one more observation that is 1 off, so that sessions that agree by chance do not seem certain."""
    mean = sum(values) / len(values)
    return (1 + sum((value - mean) ** 2 for value in values)) / len(values)
