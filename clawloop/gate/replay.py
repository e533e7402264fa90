"""The replay of held-out turns: whether a version prefers blamed replies more than its parent did.

A paired bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993) over turns that were never trained:
each turn is scored under both versions, and turns are drawn anew, praised and blamed ones each among themselves.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from clawloop.contracts.training import CheckName, CheckResult, GateCheck, HeldOutScore

MIN_TURNS = 32
"""With fewer turns the interval is so wide that only a collapse would show, which the numbers show as well."""
MIN_OF_EACH = 4
"""Fewer praised or blamed turns than this say nothing about the others of their kind."""
_LEVEL = 0.95
_DRAWS = 2000


def check_replay(scores: Sequence[HeldOutScore], seed: str) -> GateCheck:
    """Fails if the bootstrap says at 95 % that the version prefers the blamed over the praised more than its parent.

    Args:
        seed: of the draws: the same turns and version give the same result.
    """
    praised = [score.change for score in scores if score.verdict > 0]
    blamed = [score.change for score in scores if score.verdict < 0]
    counts: Mapping[str, float | None] = {"praised": len(praised), "blamed": len(blamed)}
    if len(scores) < MIN_TURNS or min(len(praised), len(blamed)) < MIN_OF_EACH:
        reason = f"{len(praised)} praised and {len(blamed)} blamed turns held out, {MIN_TURNS} are needed"
        return GateCheck(CheckName.REPLAY, CheckResult.NOT_ENOUGH, reason, counts)
    change = _mean(praised) - _mean(blamed)
    rng = random.Random(seed)
    drawn = sorted(
        _mean(rng.choices(praised, k=len(praised))) - _mean(rng.choices(blamed, k=len(blamed))) for _ in range(_DRAWS)
    )
    # The one-sided 95 % bound: in 95 of 100 draws the change is at most this.
    bound = drawn[int(_LEVEL * _DRAWS) - 1]
    figures: Mapping[str, float | None] = {**counts, "change": change, "upper_bound": bound}
    words = f"preference for praised over blamed replies changed by {change:+.3f} nats a token, at most {bound:+.3f}"
    return GateCheck(
        CheckName.REPLAY, CheckResult.FAILED if bound < 0 else CheckResult.PASSED, f"{words} (95 %)", figures
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
