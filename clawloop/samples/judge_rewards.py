"""Rewards of a learning judge for its votes on the turns of episodes (RLAnything, arXiv 2602.02488)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.algorithms.rewards import group_advantages, integrated_reward, judge_consistency, process_reward
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import TurnId
from clawloop.judging.parsing import Vote
from clawloop.judging.voting import signed


@dataclass(frozen=True, slots=True)
class CastVote:
    """A vote on a turn of an episode with a reward, whose words a gateway recorded.

    Args:
        turn: the judge's own, which has the vote's tokens.
        mean_vote: of all valid votes on the judged turn.
        succeeded: of the judged turn's episode.
        process_weight: λ of the judged policy.
        not_trainable: why the judge's turn cannot be trained; None if it can.
    """

    turn: TurnId
    vote: Vote
    mean_vote: float
    succeeded: bool
    process_weight: float
    not_trainable: str | None


@dataclass(frozen=True, slots=True)
class RewardedVote:
    """
    Args:
        reward: R_i·S_ij.
        advantage: None if the vote gives no sample.
    """

    turn: TurnId
    reward: float
    outcome: TurnOutcome
    why: str
    advantage: float | None


def reward_votes(votes: Sequence[CastVote]) -> list[RewardedVote]:
    """Reward the votes on all turns of one rollout group, compared with each other.

    R_i = O + λ · mean vote. O is 1 for an episode that succeeded and −1 for another, whatever its reward: were it 0 for
    a failure, praising a turn of a failed episode would agree with itself. Equal rewards teach nothing.
    """
    rewards = [_reward(vote) for vote in votes]
    advantages = group_advantages(rewards) if len(votes) > 1 else (None,) * len(votes)
    return [_rewarded(*each, len(votes)) for each in zip(votes, rewards, advantages, strict=True)]


def _reward(vote: CastVote) -> float:
    outcome = 1 if vote.succeeded else -1
    integrated = integrated_reward(outcome, process_reward(vote.mean_vote, process_weight=vote.process_weight))
    assert integrated is not None  # both terms are known
    return judge_consistency(integrated, vote.vote)


def _rewarded(vote: CastVote, reward: float, advantage: float | None, count: int) -> RewardedVote:
    ended = "success" if vote.succeeded else "failure"
    why = f"vote {signed(vote.vote)}, mean {vote.mean_vote:+.2f}, episode a {ended}: consistency {reward:+.2f}"
    if vote.not_trainable is not None:
        return RewardedVote(vote.turn, reward, TurnOutcome.NOT_TRAINABLE, vote.not_trainable, None)
    if not advantage:
        return RewardedVote(vote.turn, reward, TurnOutcome.UNDECIDED, f"{why}, nothing to compare", None)
    compared = f"{why}, advantage {advantage:+.2f} among {count} votes"
    return RewardedVote(vote.turn, reward, TurnOutcome.SAMPLED, compared, advantage)
