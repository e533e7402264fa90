"""The result of a rollout group, settled or dropped, and of each turn of its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from clawloop.core.algorithms.rewards import (
    episode_advantages,
    episode_outcome,
    needed_rewards,
    overlong_penalty,
    process_reward,
    step_advantages,
)
from clawloop.core.contracts.episodes import EpisodeState, GroupState
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import EpisodeId, JudgementId, TurnId
from clawloop.core.recipes.recipe import Signal


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """A main turn that waits for its group.

    Args:
        not_trainable: why it cannot be trained; None if it can.
        votes: mean of the judge's votes on it; None if it has none.
        judgement: which has those votes; None if no judge was asked.
        tokens: of its reply; None if it has no end, and then no penalty for its length.
        cut_by_length: the reply ended at its token limit.
    """

    id: TurnId
    not_trainable: str | None
    votes: float | None = None
    judgement: JudgementId | None = None
    tokens: int | None = None
    cut_by_length: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """The last attempt at one place of a group.

    Args:
        id: None if none began.
        reward: in 0..1.
        turns: in their order.
    """

    id: EpisodeId | None
    state: EpisodeState
    reward: float | None
    reason: str | None
    turns: Sequence[EpisodeTurn]


@dataclass(frozen=True, slots=True)
class SettledTurn:
    """
    Args:
        advantage: None if the turn gives no sample.
    """

    outcome: TurnOutcome
    why: str
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """
    Args:
        advantages: of episodes whose turns all have the same.
    """

    state: GroupState
    reason: str
    scored: int
    mean_reward: float | None
    turns: Mapping[TurnId, SettledTurn]
    advantages: Mapping[EpisodeId, float]


def judges_episodes(signal: Signal) -> bool:
    """True if votes on each turn of an episode are part of its reward."""
    return signal.reward == "outcome_process" and signal.verdicts and signal.process_weight > 0


def settle(members: Sequence[Member], signal: Signal, *, no_recipe: bool = False) -> Settlement:
    """
    Args:
        members: one for each place of the group.
        no_recipe: the policy has no recipe, so that nothing can be learned.

    Raises:
        StreamsUnusable: a reward is not finite.
    """
    rewards = [member.reward for member in members]
    known = [reward for reward in rewards if reward is not None]
    mean = fmean(known) if known else None
    if signal.episode_advantage == "step":
        by_step = step_advantages([None if m.reward is None else _turn_rewards(m, m.reward, signal) for m in members])
        advantages = by_step
    else:
        by_episode = episode_advantages(
            [None if m.reward is None else _episode_reward(m, m.reward, signal) for m in members]
        )
        advantages = (
            None
            if by_episode is None
            else tuple(tuple([a] * len(m.turns)) for a, m in zip(by_episode, members, strict=True))
        )
    reason = _reason(members, mean, advantages, no_recipe)
    dropped = advantages is None
    turns: dict[TurnId, SettledTurn] = {}
    same: dict[EpisodeId, float] = {}
    for index, member in enumerate(members):
        unknown = advantages is None or no_recipe or member.reward is None
        of_member = [None] * len(member.turns) if advantages is None or unknown else advantages[index]
        for turn, advantage, penalty in zip(member.turns, of_member, _penalties(member, signal), strict=True):
            turns[turn.id] = _settle_turn(turn, member, advantage, penalty, reason, len(known))
        values = set(of_member)
        if member.id is not None and len(values) == 1 and (only := values.pop()) is not None:
            same[member.id] = only
    return Settlement(GroupState.DROPPED if dropped else GroupState.SETTLED, reason, len(known), mean, turns, same)


def hold_out(settlement: Settlement) -> Settlement:
    """The settlement with its samples held out: their turns are never trained, and versions are compared on them."""
    turns = {
        turn: replace(settled, outcome=TurnOutcome.HELD_OUT, why=f"held out: {settled.why}")
        if settled.outcome is TurnOutcome.SAMPLED
        else settled
        for turn, settled in settlement.turns.items()
    }
    return replace(settlement, turns=turns)


def _turn_rewards(member: Member, reward: float, signal: Signal) -> list[float]:
    """R_ij = O + λ · mean vote + length penalty of each turn, of the terms that are known; O in −1..1."""
    terms = zip(_process(member, signal), _penalties(member, signal), strict=True)
    return [episode_outcome(reward) + (process or 0.0) + (penalty or 0.0) for process, penalty in terms]


def _episode_reward(member: Member, reward: float, signal: Signal) -> float:
    """R_i = O + λ · mean vote + mean length penalty over the episode's turns that have them; O in −1..1."""
    terms = (_process(member, signal), _penalties(member, signal))
    return episode_outcome(reward) + sum(_mean_of_known(term) for term in terms)


def _process(member: Member, signal: Signal) -> list[float | None]:
    """λ · mean vote of each turn; None without a vote, as the last one is."""
    weight = signal.process_weight if judges_episodes(signal) else 0.0
    return [None if turn.votes is None else process_reward(turn.votes, process_weight=weight) for turn in member.turns]


def _penalties(member: Member, signal: Signal) -> list[float | None]:
    """The length penalty of each turn's reply; None where its length is not known, or the recipe has none."""
    overlong = signal.overlong
    return [
        None
        if overlong is None or turn.tokens is None
        else overlong_penalty(
            turn.tokens,
            limit_tokens=overlong.limit_tokens,
            cache_tokens=overlong.cache_tokens,
            cut_by_length=turn.cut_by_length,
        )
        for turn in member.turns
    ]


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else 0.0


def _reason(
    members: Sequence[Member],
    mean: float | None,
    advantages: Sequence[Sequence[float | None]] | None,
    no_recipe: bool,
) -> str:
    scored, size = sum(member.reward is not None for member in members), len(members)
    if advantages is None:
        lacking = [member for member in members if member.reward is None]
        return f"{scored} of {size} episodes have a reward, {needed_rewards(size)} are needed{_for_example(lacking)}"
    if no_recipe:
        return "the policy has no recipe"
    if not any(advantage is not None for of_member in advantages for advantage in of_member):
        return f"nothing to compare: {scored} of {size} episodes have a reward, mean {mean:.3g}{_for_example(members)}"
    return f"{scored} of {size} episodes have a reward, mean {mean:.3g}"


def _for_example(members: Sequence[Member]) -> str:
    """The last member's failure, to be added to the group's reason; empty if no member failed."""
    reasons = [member.reason for member in members if member.reason]
    return f"; for example: {reasons[-1]}" if reasons else ""


def _settle_turn(
    turn: EpisodeTurn,
    member: Member,
    advantage: float | None,
    penalty: float | None,
    group_reason: str,
    scored: int,
) -> SettledTurn:
    if member.reward is None:
        return SettledTurn(TurnOutcome.UNJUDGED, f"its episode has no reward: {member.reason or member.state}")
    if turn.not_trainable is not None:
        return SettledTurn(TurnOutcome.NOT_TRAINABLE, turn.not_trainable)
    if advantage is None:
        return SettledTurn(TurnOutcome.UNDECIDED, f"reward {member.reward:.3g}; {group_reason}")
    votes = "" if turn.votes is None else f", mean vote {turn.votes:+.2f}"
    length = f", length {penalty:+.2f}" if penalty else ""
    why = f"reward {member.reward:.3g}{votes}{length}, advantage {advantage:+.2f} among {scored} episodes"
    return SettledTurn(TurnOutcome.SAMPLED, why, advantage)
