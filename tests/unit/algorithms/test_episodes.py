"""Advantages of episodes, against values computed by hand."""

from __future__ import annotations

import math

import pytest

from clawloop.core.algorithms.rewards import episode_advantages, needed_rewards, step_advantages
from clawloop.core.errors import StreamsUnusable


@pytest.mark.parametrize(("size", "needed"), [(2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (9, 5)])
def test_half_of_a_group_must_have_a_reward_and_at_least_two(size: int, needed: int) -> None:
    assert needed_rewards(size) == needed


def test_advantages_are_relative_to_the_group() -> None:
    # mean 1/4, population variance 3/16
    found = episode_advantages([1, 0, 0, 0])
    assert found is not None
    assert found == pytest.approx((math.sqrt(3), *[-1 / math.sqrt(3)] * 3))


def test_an_episode_without_a_reward_is_no_failure() -> None:
    # Counted as 0 it would move the mean of the others to 1/2.
    found = episode_advantages([1, 1, 0, None])
    assert found is not None
    assert found[3] is None
    assert found[:3] == pytest.approx((1 / math.sqrt(2), 1 / math.sqrt(2), -math.sqrt(2)))


def test_a_group_of_equal_rewards_gives_no_sample() -> None:
    assert episode_advantages([1, 1, 1, None]) == (None, None, None, None)


def test_an_episode_at_the_mean_gives_no_sample() -> None:
    found = episode_advantages([0, 0.5, 1])
    assert found is not None
    assert found[1] is None
    assert found[0] == pytest.approx(-math.sqrt(1.5))


@pytest.mark.parametrize("rewards", [[1, None], [1, None, None, None], [1, 0, None, None, None], []])
def test_too_few_rewards_drop_the_group(rewards: list[float | None]) -> None:
    assert episode_advantages(rewards) is None
    assert step_advantages([None if reward is None else [reward] for reward in rewards]) is None


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(StreamsUnusable, match="not finite"):
        episode_advantages([1, math.nan])


def test_turns_are_compared_with_turns_of_the_same_index() -> None:
    found = step_advantages([[1, 2], [0, 2, 5], None, [0.5]])
    assert found is not None
    first, second, missing, short = found
    assert first[0] == pytest.approx(math.sqrt(1.5))
    assert first[1:] == (None,)  # both second turns have the same reward
    assert second[0] == pytest.approx(-math.sqrt(1.5))
    assert second[1:] == (None, None)  # nobody else has a third turn
    assert missing == ()
    assert short == (None,)  # the mean itself
