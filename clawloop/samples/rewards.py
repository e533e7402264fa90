"""What a judged turn is worth: by its own verdict, and in relation to other turns.

Knows nothing about Postgres. Some rewards are known only later: a group's when each member has its verdict, an
outcome's when the session closes. Until then such a turn is undecided and says what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clawloop.algorithms.groups import group_advantages, is_complete
from clawloop.algorithms.outcome import integrated_reward, judge_consistency, process_reward
from clawloop.algorithms.overlong import overlong_penalty
from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import TurnId
from clawloop.judging.records import FinalizedJudgement, Relation
from clawloop.judging.voting import Verdict
from clawloop.recipes.recipe import Signal


def relation_of(signal: Signal, *, grouped: bool) -> Relation:
    """What a verdict's reward is set in relation to.

    Args:
        grouped: the turn is one of several responses to one prompt; alone it is worth its verdict.
    """
    if not signal.verdicts:
        return Relation.NONE
    if signal.reward == "group":
        return Relation.GROUP if grouped else Relation.NONE
    if signal.reward == "outcome_process":
        return Relation.OUTCOME
    return Relation.MEAN if signal.baseline == "mean" else Relation.NONE


def shape_reward(signal: Signal, verdict: Verdict, relation: Relation, *, tokens: int, cut_by_length: bool) -> Verdict:
    """The verdict with the reward of this turn alone: with the penalty for length, where the recipe has one.

    A verdict of 0 is no opinion, and length alone is none either; only in relation to others does a 0 count. Beside an
    outcome it is the mean of the votes that counts, (λ/m)·ΣS_j.
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


def with_reward(end: FinalizedJudgement, reward: float, said: str) -> FinalizedJudgement:
    """The same end with another reward term; 0 is none, and then only a hint makes a sample."""
    term = reward or None
    why = f"{end.why}; {said}"
    if term is None and end.hint.text is None:
        return replace(end, reward=None, outcome=TurnOutcome.UNDECIDED, why=why)
    if end.not_trainable is not None:
        return replace(end, reward=None, outcome=TurnOutcome.NOT_TRAINABLE, why=f"{end.not_trainable} ({why})")
    return replace(end, reward=term, outcome=TurnOutcome.SAMPLED, why=why)


@dataclass(frozen=True, slots=True)
class Member:
    """One of several responses to one prompt.

    Args:
        reward: by its own verdict; None if it has none.
        not_trainable: why it cannot be trained; its reward counts for the others all the same.
        why: of its own verdict.
        taken: a step has, or had, its sample: it stays as it is.
        mean_vote: of the judge's valid votes; None without any, as where a user has rated the turn unjudged.
    """

    turn_id: TurnId
    reward: float | None
    not_trainable: str | None
    why: str
    taken: bool
    mean_vote: float | None = None


@dataclass(frozen=True, slots=True)
class MemberResult:
    """What becomes of a member; `reward` is None unless it is sampled."""

    turn_id: TurnId
    reward: float | None
    outcome: TurnOutcome
    why: str


def group_ends(members: Sequence[Member], *, session_closed: bool) -> list[MemberResult]:
    """What becomes of those members that have a verdict and are still open, all at once (GRPO, DESIGN section 7)."""
    rewards = [member.reward for member in members]
    known = sum(reward is not None for reward in rewards)
    open_members = [member for member in members if member.reward is not None and not member.taken]
    if not is_complete(rewards, session_closed=session_closed):
        waits = f"waits for its group: {known} of {len(members)} have a verdict"
        return [
            MemberResult(member.turn_id, None, TurnOutcome.UNDECIDED, f"{waits} ({member.why})")
            for member in open_members
        ]
    worth = dict(zip([member.turn_id for member in members], group_advantages(rewards), strict=True))
    return [_end(member, worth[member.turn_id], known) for member in open_members]


def _end(member: Member, advantage: float | None, known: int) -> MemberResult:
    if known < 2:
        why = f"the only verdict in its group: {member.why}"
    elif advantage is None:
        why = f"group agrees ({member.why})"
    else:
        why = f"{advantage:+.2f} in its group of {known} ({member.why})"
    return _ended(member, advantage, why)


def outcome_ends(members: Sequence[Member], outcome: int | None) -> list[MemberResult]:
    """R = O + (λ/m)·ΣS of each turn of a closed session, of the terms that are known (RLAnything).

    Beside an outcome each judged turn says what its votes earned the judge on average, R·S: `judge +0.44`.

    Args:
        outcome: of the session's task, 1 or −1; None if nobody said.
    """
    ends = []
    for member in members:
        reward = integrated_reward(outcome, member.reward)
        if member.taken or reward is None:
            continue
        said = [] if member.reward is None else [f"process {member.reward:+.2f}"]
        if outcome is None:
            said.append("no outcome")
        else:
            said.insert(0, f"outcome {outcome:+d}")
            if member.mean_vote is not None:
                said.append(f"judge {judge_consistency(reward, member.mean_vote):+.2f}")
        ends.append(_ended(member, reward, f"{', '.join(said)} ({member.why})"))
    return ends


def outcome_waits(member: Member) -> MemberResult:
    """What becomes of a judged turn until its session closes."""
    return MemberResult(member.turn_id, None, TurnOutcome.UNDECIDED, f"waits for its session's outcome ({member.why})")


def _ended(member: Member, reward: float | None, why: str) -> MemberResult:
    if not reward:
        return MemberResult(member.turn_id, None, TurnOutcome.UNDECIDED, why)
    if member.not_trainable is not None:
        return MemberResult(member.turn_id, None, TurnOutcome.NOT_TRAINABLE, f"{member.not_trainable} ({why})")
    return MemberResult(member.turn_id, reward, TurnOutcome.SAMPLED, why)
