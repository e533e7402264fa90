"""What a turn is worth: length, the mean verdict, and the other responses to its prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_turn_id
from clawloop.core.judging.hints import NOT_ASKED, HintChoice
from clawloop.core.judging.records import FinalizedJudgement, Relation, TurnDecision
from clawloop.core.judging.voting import Vote, majority
from clawloop.core.recipes.recipe import Signal
from clawloop.core.samples.rewards import (
    Member,
    decide_by_outcome,
    decide_group,
    relation_of,
    shape_reward,
    with_reward,
)

OVERLONG = Signal.model_validate({"overlong": {"limit_tokens": 1000, "cache_tokens": 200}})
GOOD, EVEN = majority([1, 1, 1]), majority([1, -1, 0])
JUDGEMENT = FinalizedJudgement(GOOD, NOT_ASKED, None, 1.0, None, TurnOutcome.SAMPLED, "verdict +1", Relation.MEAN)


@pytest.mark.parametrize(("tokens", "cut", "reward"), [(700, False, 1.0), (900, False, 0.5), (1100, False, 0.0)])
def test_the_length_penalty_is_that_of_the_article(tokens: int, cut: bool, reward: float) -> None:
    found = shape_reward(OVERLONG, GOOD, Relation.NONE, tokens=tokens, cut_by_length=cut)
    assert found.reward == pytest.approx(reward)
    assert (found.verdict, found.expected) == (1, 1.0)


@pytest.mark.parametrize(("weight", "outcome", "reward"), [(1.0, 1, 4 / 3), (0.5, 1, 7 / 6), (2.0, -1, -1 / 3)])
def test_votes_are_weighted_against_an_outcome_by_the_recipe(weight: float, outcome: int, reward: float) -> None:
    votes: list[Vote | None] = [1, 1, -1]
    signal = Signal(reward="outcome_process", process_weight=weight, hints=False)
    found = shape_reward(signal, majority(votes), Relation.OUTCOME, tokens=3, cut_by_length=False)
    turn = Member(new_turn_id(), found.reward, None, found.why, taken=False)
    (decision,) = decide_by_outcome([turn], outcome).values()
    assert decision.reward == pytest.approx(reward)


@pytest.mark.parametrize(("outcome", "judge"), [(1, "+0.44"), (-1, "-0.22")])
def test_the_reason_names_what_the_votes_earned_the_judge(outcome: int, judge: str) -> None:
    """R·S of each vote on average: 4/3 · (1 + 1 − 1)/3, and −2/3 · 1/3."""
    turn = Member(new_turn_id(), 1 / 3, None, "2 of 3 votes for 1", taken=False, mean_vote=1 / 3)
    (decision,) = decide_by_outcome([turn], outcome).values()
    assert decision.why == f"outcome {outcome:+d}, process +0.33, judge {judge} (2 of 3 votes for 1)"
    (alone,) = decide_by_outcome([turn], None).values()
    assert alone.why == "process +0.33, no outcome (2 of 3 votes for 1)"


def test_a_reply_cut_by_length_gets_the_full_penalty_and_the_reason_names_it() -> None:
    found = shape_reward(OVERLONG, majority([-1]), Relation.NONE, tokens=3, cut_by_length=True)
    assert (found.reward, found.why) == (-2.0, "1 of 1 votes for -1, length -1.00")


def test_length_alone_is_no_verdict_but_counts_in_a_group() -> None:
    assert shape_reward(OVERLONG, EVEN, Relation.NONE, tokens=1100, cut_by_length=False) == EVEN
    assert shape_reward(OVERLONG, EVEN, Relation.GROUP, tokens=1100, cut_by_length=False).reward == -1.0
    missing = majority([None])
    assert shape_reward(OVERLONG, missing, Relation.GROUP, tokens=1100, cut_by_length=False) == missing


def test_the_relation_of_rewards_by_recipe() -> None:
    group = Signal.model_validate({"reward": "group", "hints": False})
    assert relation_of(group, grouped=True) is Relation.GROUP
    assert relation_of(group, grouped=False) is Relation.NONE
    assert relation_of(Signal(baseline="mean"), grouped=True) is Relation.MEAN
    assert relation_of(Signal(), grouped=True) is Relation.NONE


def test_a_reward_of_0_leaves_no_term() -> None:
    gone = with_reward(JUDGEMENT, 0.0, "mean before +1.00")
    assert (gone.reward, gone.outcome, gone.why) == (None, TurnOutcome.UNDECIDED, "verdict +1; mean before +1.00")
    less = with_reward(JUDGEMENT, 0.25, "mean before +0.75")
    assert (less.reward, less.outcome) == (0.25, TurnOutcome.SAMPLED)


def test_a_reward_of_0_leaves_the_hint() -> None:
    hint = HintChoice("Use Python.", answered=True, why="1 of 1")
    hinted = replace(JUDGEMENT, hint=hint, hinted_prompt_ids=(1, 2))
    left = with_reward(hinted, 0.0, "mean before +1.00")
    assert (left.reward, left.hinted_prompt_ids, left.outcome) == (None, (1, 2), TurnOutcome.SAMPLED)


def members(*rewards: float | None, taken: frozenset[int] = frozenset()) -> list[Member]:
    return [Member(new_turn_id(), reward, None, f"r {reward}", n in taken) for n, reward in enumerate(rewards)]


def test_a_complete_group_gives_the_articles_advantages() -> None:
    group = members(1.0, -1.0, 1.0, 0.0)
    decisions = decide_group(group, session_closed=False)
    assert list(decisions) == [member.turn_id for member in group]
    assert [round(decision.reward or 0, 2) for decision in decisions.values()] == [0.90, -1.51, 0.90, -0.30]
    assert {decision.outcome for decision in decisions.values()} == {TurnOutcome.SAMPLED}
    assert decisions[group[1].turn_id].why == "-1.51 in its group of 4 (r -1.0)"


def test_a_group_waits_until_its_session_closes() -> None:
    group = members(1.0, None, -1.0)
    assert decide_group(group, session_closed=False) == {
        group[n].turn_id: TurnDecision(
            TurnOutcome.UNDECIDED, f"waits for its group: 2 of 3 have a verdict (r {group[n].reward})"
        )
        for n in (0, 2)
    }
    assert [decision.reward for decision in decide_group(group, session_closed=True).values()] == [1.0, -1.0]


def test_a_group_that_agrees_gets_no_sample() -> None:
    (one, other) = decide_group(members(-1.0, -1.0), session_closed=False).values()
    assert (one.reward, one.outcome, one.why) == (None, TurnOutcome.UNDECIDED, "group agrees (r -1.0)")
    assert other.outcome is TurnOutcome.UNDECIDED


@pytest.mark.parametrize(("reward", "outcome"), [(-1.0, TurnOutcome.SAMPLED), (0.0, TurnOutcome.UNDECIDED)])
def test_a_lone_verdict_counts_as_it_is(reward: float, outcome: TurnOutcome) -> None:
    (decision,) = decide_group(members(None, reward, None), session_closed=True).values()
    assert (decision.reward, decision.outcome) == (reward or None, outcome)


def test_a_taken_member_stays_and_an_untrainable_one_counts_for_the_others() -> None:
    group = members(1.0, -1.0, 1.0, 0.0, taken=frozenset({0}))
    group[1] = Member(group[1].turn_id, -1.0, "not trainable: top_p", "r -1.0", False)
    decisions = decide_group(group, session_closed=False)
    assert group[0].turn_id not in decisions
    untrainable = decisions[group[1].turn_id]
    assert (untrainable.outcome, untrainable.reward) == (TurnOutcome.NOT_TRAINABLE, None)
    assert round(decisions[group[2].turn_id].reward or 0, 2) == 0.90
