"""Rewards of a judge's votes: the example of RLAnything, and what is compared with what."""

from __future__ import annotations

from uuid import uuid4

import pytest

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import TurnId
from clawloop.core.judging.voting import Vote
from clawloop.core.samples.rewards import CastVote, reward_votes


def cast(votes: list[Vote], *, succeeded: bool, weight: float = 1.0, why: str | None = None) -> list[CastVote]:
    """The votes on one turn."""
    mean = sum(votes) / len(votes)
    return [CastVote(TurnId(uuid4()), vote, mean, succeeded, weight, why) for vote in votes]


def test_a_vote_that_agrees_with_the_turns_reward_is_rewarded_and_one_that_does_not_is_punished() -> None:
    rewarded = reward_votes(cast([1, 1, -1], succeeded=True))
    assert [each.reward for each in rewarded] == pytest.approx([4 / 3, 4 / 3, -4 / 3])
    assert [each.advantage for each in rewarded] == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])
    assert {each.outcome for each in rewarded} == {TurnOutcome.SAMPLED}
    why = "vote -1, mean +0.33, episode a success: consistency -1.33, advantage -1.41 among 3 votes"
    assert rewarded[2].why == why


def test_praise_of_a_failed_episode_is_worth_less_than_blame() -> None:
    praised, blamed = reward_votes([*cast([1], succeeded=False), *cast([-1], succeeded=False)])
    assert (praised.reward, blamed.reward) == (0.0, 2.0)
    assert praised.advantage is not None
    assert blamed.advantage is not None
    assert praised.advantage < 0 < blamed.advantage


@pytest.mark.parametrize("votes", [[], cast([1], succeeded=True), cast([1, 1], succeeded=True)])
def test_votes_of_the_same_worth_teach_nothing(votes: list[CastVote]) -> None:
    assert [each.outcome for each in reward_votes(votes)] == [TurnOutcome.UNDECIDED] * len(votes)
    assert all(each.advantage is None for each in reward_votes(votes))


def test_the_weight_of_votes_is_the_judged_policys() -> None:
    assert [each.reward for each in reward_votes(cast([1, -1, -1], succeeded=True, weight=0.0))] == [1, -1, -1]


def test_a_vote_that_cannot_be_trained_says_why_and_is_compared_all_the_same() -> None:
    (good, bad) = reward_votes([*cast([1], succeeded=True), *cast([1], succeeded=False, why="not trainable: top_p")])
    assert (bad.outcome, bad.why, bad.advantage) == (TurnOutcome.NOT_TRAINABLE, "not trainable: top_p", None)
    assert good.advantage == pytest.approx(1.0)
