"""Rewards of whole responses: running baseline, group advantage, outcome + process, overlong penalty.

Plain Python without torch, so that the code that makes samples can use it. A reward that is not known is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from clawloop.errors import StreamsUnusable

# Below this, rewards differ by rounding only; dividing by it would amplify noise to the size of a verdict.
_CONSTANT = 1e-6


@dataclass(frozen=True, slots=True)
class RunningMean:
    """Running mean of a policy's verdicts, the baseline of recipes with `baseline = "mean"`.

    Args:
        count: number of verdicts so far.
        total: their sum.
    """

    count: int = 0
    total: float = 0.0

    def including(self, verdict: float) -> RunningMean:
        return RunningMean(self.count + 1, self.total + verdict)

    def relative(self, verdict: float) -> float:
        """The verdict minus the mean of earlier verdicts; the first verdict is returned unchanged.

        Only for verdicts of ±1: 0 means "no opinion", and subtracting the mean would turn it into one.
        """
        return verdict - self.total / self.count if self.count else verdict


def is_complete(rewards: Sequence[float | None], *, session_closed: bool) -> bool:
    """True when no further reward of a group can arrive: every member has one, or the session is closed."""
    return session_closed or all(reward is not None for reward in rewards)


def group_advantages(rewards: Sequence[float | None]) -> tuple[float | None, ...]:
    """Group-relative advantages (r_i − mean) / std, with the population's std (GRPO, arXiv 2402.03300).

    Args:
        rewards: one per member of a complete group; None for a member without a verdict.

    Returns:
        One per member; None where the member gives no sample. A group whose rewards are all equal gives none.
        With fewer than two rewards there is no group: the reward itself is returned (None for 0).

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


def process_reward(mean_vote: float, *, process_weight: float) -> float:
    """(λ/m)·ΣS_j of one turn (RLAnything, arXiv 2602.02488).

    Args:
        mean_vote: mean of the turn's valid votes, or of a direct vote's distribution.
        process_weight: λ.
    """
    return process_weight * mean_vote


def integrated_reward(outcome: int | None, process: float | None) -> float | None:
    """R = O + (λ/m)·ΣS_j of one turn, from the terms that are known.

    Args:
        outcome: O, whether the session's task succeeded, 1 or −1; None if nobody reported it.
        process: `process_reward`; None if there is no valid vote.

    Returns:
        None if neither term is known.
    """
    if outcome is None:
        return process
    return outcome + (process or 0.0)


def judge_consistency(reward: float, mean_vote: float) -> float:
    """R·S, the judge's own reward, for one vote or averaged over a turn's votes.

    Negative when the judge's vote contradicts the turn's reward.
    """
    return reward * mean_vote


def precision_bound(votes: int, *, true_positive_rate: float, true_negative_rate: float) -> float:
    """Lower bound of the share of turns that m votes judge rightly: 1 − exp(−m(μ − 1)²/4), μ the sum of both rates.

    0 for a judge no better than chance (μ ≤ 1): more votes do not help it.

    Raises:
        ValueError: a rate outside 0..1, or a negative number of votes.
    """
    if votes < 0 or not (0 <= true_positive_rate <= 1 and 0 <= true_negative_rate <= 1):
        raise ValueError(f"{votes} votes at rates {true_positive_rate} and {true_negative_rate}")
    better = max(0.0, true_positive_rate + true_negative_rate - 1)
    return -math.expm1(-votes * better**2 / 4)


def overlong_penalty(tokens: int, *, limit_tokens: int, cache_tokens: int, cut_by_length: bool) -> float:
    """Soft penalty on replies near the length limit, in −1..0 (overlong shaping of DAPO, arXiv 2503.14476).

    0 up to limit − cache, then linear down to −1 at the limit; −1 above it, or when cut by length.

    Args:
        tokens: response tokens, ≥ 0.
        limit_tokens: L_max.
        cache_tokens: L_cache, the width of the slope; 0 < cache ≤ limit.
        cut_by_length: the reply ended at its token limit instead of by itself.

    Raises:
        ValueError: a slope that does not fit below the limit.
    """
    if not 0 < cache_tokens <= limit_tokens or tokens < 0:
        raise ValueError(f"{tokens} tokens with limit {limit_tokens} and cache {cache_tokens}")
    if cut_by_length or tokens > limit_tokens:
        return -1.0
    # + 0.0 turns −0.0 into 0.0.
    return min(0.0, (limit_tokens - cache_tokens - tokens) / cache_tokens) + 0.0
