"""The replay of held-out turns: whether a version prefers blamed replies more than its parent did.

A paired, studentised bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 12.5) over
turns that were never trained: each turn is scored under both versions. Turns of one session, or of one rollout group,
change alike, so that their mean counts once, and these means are drawn anew, of praised and blamed turns each among
themselves: with eight turns in each of 16 sessions, whose changes correlate by 0.4, drawing turns called 24 % of
versions worse that were not, and drawing means 6 %. Plain percentiles of the draws called 6 to 12 % of versions worse
that were not, with as few means as there are; divided by their standard errors, as here, the draws call 5 to 6 % worse,
and 8 % where a few change much more than the others.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from clawloop.contracts.gate_checks import CheckName, CheckResult, GateCheck
from clawloop.contracts.training import HeldOutScore

MIN_TURNS = 32
"""Fewest turns of a replay: with fewer only a collapse would show, which the step's numbers show as well."""
MIN_OF_EACH = 8
"""Fewest sessions or groups with praised turns, and with blamed turns: the spread of fewer is unknown. With 4, one
version in seven was called worse."""
MARGIN = 0.01
"""A smaller loss, in nats a token, rejects nothing, however sure: once a policy has learned what there is, its steps
are so small and so alike on all turns that a loss of 0.001 was significant, three times in a row."""
_ALPHA = 0.05
_DRAWS = 1000


def check_replay(scores: Sequence[HeldOutScore], seed: str) -> GateCheck:
    """Fails if the bootstrap says at 95 % that the version prefers the blamed over the praised more than its parent,
    by more than `MARGIN`.

    Args:
        seed: of the draws: the same turns and version give the same result.
    """
    of_praised = [score for score in scores if score.verdict > 0]
    of_blamed = [score for score in scores if score.verdict < 0]
    counts: Mapping[str, float | None] = {"praised": len(of_praised), "blamed": len(of_blamed)}
    turns = f"{len(of_praised)} praised and {len(of_blamed)} blamed turns held out"
    if len(of_praised) + len(of_blamed) < MIN_TURNS:
        return GateCheck(CheckName.REPLAY, CheckResult.NOT_ENOUGH, f"{turns}, {MIN_TURNS} are needed", counts)
    praised, blamed = _means_of_units(of_praised), _means_of_units(of_blamed)
    if min(len(praised), len(blamed)) < MIN_OF_EACH:
        units = f"of {len(praised)} and {len(blamed)} sessions or groups, {MIN_OF_EACH} of each are needed"
        return GateCheck(CheckName.REPLAY, CheckResult.NOT_ENOUGH, f"{turns}, {units}", counts)
    change, error = _difference(praised, blamed)
    bound = change + _factor(praised, blamed, change, seed) * error
    figures: Mapping[str, float | None] = {**counts, "change": change, "upper_bound": bound}
    words = f"preference for praised over blamed replies changed by {change:+.3f} nats a token, at most {bound:+.3f}"
    return GateCheck(
        CheckName.REPLAY, CheckResult.FAILED if bound < -MARGIN else CheckResult.PASSED, f"{words} (95 %)", figures
    )


def _means_of_units(scores: Sequence[HeldOutScore]) -> list[float]:
    """The mean change of each session's or group's turns."""
    changes: defaultdict[object, list[float]] = defaultdict(list)
    for place, score in enumerate(scores):
        changes[place if score.unit is None else score.unit].append(score.change)
    return [sum(values) / len(values) for values in changes.values()]


def _factor(praised: Sequence[float], blamed: Sequence[float], change: float, seed: str) -> float:
    """Distance of the one-sided 95 % bound above the change, in standard errors."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(_DRAWS):
        again, error = _difference(rng.choices(praised, k=len(praised)), rng.choices(blamed, k=len(blamed)))
        # Without any spread the draw is the change itself, or says nothing of how far off it is.
        drawn.append((again - change) / error if error > 0 else 0.0)
    return -sorted(drawn)[math.ceil(_ALPHA * _DRAWS) - 1]


def _difference(praised: Sequence[float], blamed: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, and its standard error."""
    means = [sum(values) / len(values) for values in (praised, blamed)]
    variance = sum(
        sum((value - mean) ** 2 for value in values) / ((len(values) - 1) * len(values))
        for values, mean in zip((praised, blamed), means, strict=True)
    )
    return means[0] - means[1], math.sqrt(variance)
