"""Rewards and advantages of whole responses and episodes, and whether a sample is too stale. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from clawloop.core.errors import StreamsUnusable

# Responses ------------------------------------------------------------------------------------------------------------
# Rewards of whole responses: running baseline, group advantage, outcome + process, overlong penalty.
#
# Plain Python without torch, so that the code that makes samples can use it. A reward that is not known is None, never
# 0.

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


# Episodes -------------------------------------------------------------------------------------------------------------
# Advantages of the episodes of one rollout group: k attempts at one task, compared with each other.
#
# GRPO with the reward of the whole attempt (outcome supervision, arXiv 2402.03300): each token of each turn of episode
# i has the advantage Â_i = (R_i − mean R) / std R, over the episodes that have a reward, with the population's std.
# Plain Python without torch. An episode without a reward has none: it is not a reward of 0.


def needed_rewards(size: int) -> int:
    """The least number of episodes with a reward by which a group of `size` is settled: max(2, ⌈size/2⌉)."""
    return max(2, math.ceil(size / 2))


def episode_advantages(rewards: Sequence[float | None]) -> tuple[float | None, ...] | None:
    """Â of each episode, the same for all its turns; None where the episode gives no sample.

    An episode with exactly the mean reward gives none: its gradient is 0. A group of equal rewards gives no sample at
    all.

    Args:
        rewards: R of each episode of the group; None without one.

    Returns:
        None if too few episodes have a reward to compare them: the group is dropped.

    Raises:
        StreamsUnusable: a reward is not finite.
    """
    if sum(reward is not None for reward in rewards) < needed_rewards(len(rewards)):
        return None
    return tuple(advantage or None for advantage in group_advantages(rewards))


def step_advantages(rewards: Sequence[Sequence[float] | None]) -> tuple[tuple[float | None, ...], ...] | None:
    """Â of each turn, compared only with the turns of the other episodes at the same index (RLAnything, arXiv
    2602.02488: R_ij = O_i + (λ/m)·ΣS_ij, standardised per step index).

    An index that only one episode has reached has nothing to be compared with: its turn has its reward as it is
    (OpenClaw-RL, arXiv 2603.10165 v2).

    Args:
        rewards: R of each turn of each episode, in order; None for an episode without a reward.

    Returns:
        Per episode one per turn; None if too few episodes have a reward.

    Raises:
        StreamsUnusable: a reward is not finite.
    """
    known = [turns for turns in rewards if turns is not None]
    if len(known) < needed_rewards(len(rewards)):
        return None
    longest = max((len(turns) for turns in known), default=0)
    columns: list[tuple[float | None, ...]] = []
    for index in range(longest):
        column = [None if turns is None or index >= len(turns) else turns[index] for turns in rewards]
        alone = sum(reward is not None for reward in column) < 2
        columns.append(_raw(column) if alone else group_advantages(column))
    return tuple(
        () if turns is None else tuple(columns[index][episode] or None for index in range(len(turns)))
        for episode, turns in enumerate(rewards)
    )


def episode_outcome(reward: float) -> float:
    """O of an episode in −1..1, the scale of a chat's verdict, from its reward in 0..1."""
    return 2 * reward - 1


def _raw(column: Sequence[float | None]) -> tuple[float | None, ...]:
    if any(reward is not None and not math.isfinite(reward) for reward in column):
        raise StreamsUnusable(f"rewards {list(column)} are not finite")
    return tuple(column)


# Staleness ------------------------------------------------------------------------------------------------------------
# Staleness of a sample: the limit after which it is not trained.
#
# Next-state evidence ages with each version. Explicit feedback does not; it is dropped only if the policy has drifted
# away from the response itself.


def versions_apart(version: int, head: int, parents: Mapping[int, int]) -> int:
    """Number of steps between two versions in the version tree, through their nearest common ancestor.

    The difference of their numbers would be wrong after a roll-back, when the head does not descend from `version`.

    Args:
        version: the version that answered.
        head: the version that would be trained.
        parents: version → parent, for every version but 0.

    Raises:
        KeyError: the parent of a version is not in `parents`.
    """
    up = path_to_base(version, parents)
    down = path_to_base(head, parents)
    # Both paths end at version 0, so the versions in common are their common end.
    shared = len(set(up) & set(down))
    return len(up) + len(down) - 2 * shared


def path_to_base(version: int, parents: Mapping[int, int]) -> list[int]:
    """The version, its parent, and so on to version 0."""
    path = [version]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path


def is_stale(apart: int, *, bound: int, explicit: bool) -> bool:
    """True if the sample expires: more than `bound` versions apart, and not explicit feedback."""
    return not explicit and apart > bound


def has_drifted(mean_abs_log_ratio: float, *, bound: float, explicit: bool) -> bool:
    """True if a step drops a sample of explicit feedback as `drifted`: its mean |log ρ| exceeds the bound."""
    return explicit and mean_abs_log_ratio > bound
