"""Advantages within a group: several responses to one prompt, each measured against the others (GRPO).

Knows nothing about votes. Needs no torch, so that the side that makes samples can use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from clawloop.errors import StreamsUnusable

# Below this, rewards differ by rounding only, and dividing by it would make noise as loud as a verdict.
_CONSTANT = 1e-6


def is_complete(rewards: Sequence[float | None], *, session_closed: bool) -> bool:
    """True when no member's reward can still come: each has one, or the session is closed."""
    return session_closed or all(reward is not None for reward in rewards)


def group_advantages(rewards: Sequence[float | None]) -> tuple[float | None, ...]:
    """(r_i − mean) / std over the members that have a reward, with the population's std.

    Args:
        rewards: one for each member of a complete group; None where it has no verdict.

    Returns:
        One for each member; None where it gives no sample. Of a constant group nobody is better, so none
        gives one. With fewer than two rewards there is no group, and the reward itself stands (0: no sample).

    Raises:
        StreamsUnusable: a reward is not finite.
    """
    known = [reward for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in known):
        raise StreamsUnusable(f"group rewards {known} are not finite")
    if len(known) < 2:
        return tuple(reward or None for reward in rewards)
    mean, spread = fmean(known), pstdev(known)
    if spread < _CONSTANT:
        return tuple(None for _ in rewards)
    return tuple(None if reward is None else (reward - mean) / spread for reward in rewards)
