"""Rewards of judged turns, and of a judge's votes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clawloop.core.algorithms.rewards import (
    group_advantages,
    integrated_reward,
    is_complete,
    judge_consistency,
    overlong_penalty,
    process_reward,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import TurnId
from clawloop.core.judging.records import FinalizedJudgement, Relation, TurnDecision
from clawloop.core.judging.voting import Verdict, Vote, signed
from clawloop.core.recipes.recipe import Signal

# Turns ----------------------------------------------------------------------------------------------------------------
# A judged turn's reward: by its own verdict, and in relation to other turns.
#
# Some rewards are known only later: a group's when each member has its verdict, an outcome's when the session closes.
# Until then such a turn is undecided, and its reason names what it waits for.


def relation_of(signal: Signal, *, grouped: bool) -> Relation:
    """The relation of a verdict's reward: the value that it is compared with.

    Args:
        grouped: the turn is one of several responses to one prompt; a single response is worth its verdict.
    """
    if not signal.verdicts:
        return Relation.NONE
    if signal.reward == "group":
        return Relation.GROUP if grouped else Relation.NONE
    if signal.reward == "outcome_process":
        return Relation.OUTCOME
    return Relation.MEAN if signal.baseline == "mean" else Relation.NONE


def shape_reward(signal: Signal, verdict: Verdict, relation: Relation, *, tokens: int, cut_by_length: bool) -> Verdict:
    """The verdict with the reward of this turn alone, including the recipe's length penalty.

    Verdict 0 is no opinion, and length alone is none either: without a group or an outcome it gets no penalty. With an
    outcome the reward is the weighted mean of the votes, (λ/m)·ΣS_j.
    """
    if relation is Relation.OUTCOME and verdict.expected is not None:
        verdict = replace(verdict, reward=process_reward(verdict.expected, process_weight=signal.process_weight))
    if verdict.reward is None or signal.overlong is None:
        return verdict
    if not verdict.verdict and relation not in (Relation.GROUP, Relation.OUTCOME):
        return verdict
    penalty = overlong_penalty(
        tokens,
        limit_tokens=signal.overlong.limit_tokens,
        cache_tokens=signal.overlong.cache_tokens,
        cut_by_length=cut_by_length,
    )
    if not penalty:
        return verdict
    return replace(verdict, reward=verdict.reward + penalty, why=f"{verdict.why}, length {penalty:+.2f}")


def with_reward(judgement: FinalizedJudgement, reward: float, reason: str) -> FinalizedJudgement:
    """The judgement with another reward term; 0 is no term, and then only a hint makes a sample."""
    term = reward or None
    why = f"{judgement.why}; {reason}"
    if term is None and not judgement.hint.texts:
        return replace(judgement, reward=None, outcome=TurnOutcome.UNDECIDED, why=why)
    if judgement.not_trainable is not None:
        why = f"{judgement.not_trainable} ({why})"
        return replace(judgement, reward=None, outcome=TurnOutcome.NOT_TRAINABLE, why=why)
    return replace(judgement, reward=term, outcome=TurnOutcome.SAMPLED, why=why)


@dataclass(frozen=True, slots=True)
class Member:
    """A turn whose reward depends on others: on the responses to one prompt, or on its session's outcome.

    Args:
        reward: by its own verdict; None if it has none.
        not_trainable: why it cannot be trained; its reward counts for the others all the same.
        why: the reason of its own verdict.
        taken: a step has taken its sample, so it stays as it is.
        mean_vote: mean of the judge's valid votes; None without any, e.g. where a user rated the turn.
    """

    turn_id: TurnId
    reward: float | None
    not_trainable: str | None
    why: str
    taken: bool
    mean_vote: float | None = None


def decide_group(members: Sequence[Member], *, session_closed: bool) -> dict[TurnId, TurnDecision]:
    """Decisions for the members that have a verdict and are not taken, all at once (GRPO, arXiv 2402.03300)."""
    rewards = [member.reward for member in members]
    judged = sum(reward is not None for reward in rewards)
    undecided = [member for member in members if member.reward is not None and not member.taken]
    if not is_complete(rewards, session_closed=session_closed):
        waits = f"waits for its group: {judged} of {len(members)} have a verdict"
        return {member.turn_id: TurnDecision(TurnOutcome.UNDECIDED, f"{waits} ({member.why})") for member in undecided}
    advantages = dict(zip([member.turn_id for member in members], group_advantages(rewards), strict=True))
    return {member.turn_id: _decide_by_advantage(member, advantages[member.turn_id], judged) for member in undecided}


def decide_by_outcome(members: Sequence[Member], outcome: int | None) -> dict[TurnId, TurnDecision]:
    """R = O + (λ/m)·ΣS of each turn of a closed session, of the terms that are known (RLAnything).

    With an outcome each reason also names what the votes earned the judge on average, R·S: `judge +0.44`.

    Args:
        outcome: of the session's task, 1 or −1; None if not known.
    """
    decisions: dict[TurnId, TurnDecision] = {}
    for member in members:
        reward = integrated_reward(outcome, member.reward)
        if member.taken or reward is None:
            continue
        terms = [] if member.reward is None else [f"process {member.reward:+.2f}"]
        if outcome is None:
            terms.append("no outcome")
        else:
            terms.insert(0, f"outcome {outcome:+d}")
            if member.mean_vote is not None:
                terms.append(f"judge {judge_consistency(reward, member.mean_vote):+.2f}")
        decisions[member.turn_id] = _decide_by_reward(member, reward, f"{', '.join(terms)} ({member.why})")
    return decisions


def wait_for_outcome(member: Member) -> TurnDecision:
    """The decision for a judged turn until its session closes."""
    return TurnDecision(TurnOutcome.UNDECIDED, f"waits for its session's outcome ({member.why})")


def _decide_by_advantage(member: Member, advantage: float | None, judged: int) -> TurnDecision:
    if judged < 2:
        why = f"the only verdict in its group: {member.why}"
    elif advantage is None:
        why = f"group agrees ({member.why})"
    else:
        why = f"{advantage:+.2f} in its group of {judged} ({member.why})"
    return _decide_by_reward(member, advantage, why)


def _decide_by_reward(member: Member, reward: float | None, why: str) -> TurnDecision:
    if not reward:
        return TurnDecision(TurnOutcome.UNDECIDED, why)
    if member.not_trainable is not None:
        return TurnDecision(TurnOutcome.NOT_TRAINABLE, f"{member.not_trainable} ({why})")
    return TurnDecision(TurnOutcome.SAMPLED, why, reward)


# Votes ----------------------------------------------------------------------------------------------------------------
# Rewards of a learning judge for its votes on the turns of episodes (RLAnything, arXiv 2602.02488).


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
