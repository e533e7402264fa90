"""Group advantages, overlong penalty, outcome and process, running mean and downweighting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.algorithms.advantages import with_advantage
from clawloop.core.algorithms.rewards import (
    RunningMean,
    group_advantages,
    integrated_reward,
    is_complete,
    overlong_penalty,
    precision_bound,
    process_reward,
)
from clawloop.core.algorithms.streams import Streams
from clawloop.core.errors import StreamsUnusable
from clawloop.core.recipes.recipe import Advantage


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 1.0]), min_size=2, max_size=8))
def test_group_advantages_have_mean_zero_and_spread_one_or_are_no_samples(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    known = [advantage for advantage in advantages if advantage is not None]
    if len(set(rewards)) == 1:
        assert known == []
    else:
        assert len(known) == len(rewards)
        assert sum(known) == pytest.approx(0, abs=1e-9)
        assert sum(advantage**2 for advantage in known) / len(known) == pytest.approx(1)


def test_a_member_without_a_verdict_neither_counts_nor_gives_a_sample() -> None:
    assert group_advantages((1.0, None, -1.0)) == (1.0, None, -1.0)
    assert group_advantages((0.0,)) == (None,)
    assert group_advantages((None, None)) == (None, None)


def test_rewards_that_differ_by_rounding_are_a_constant_group() -> None:
    assert group_advantages((0.1 + 0.2, 0.3)) == (None, None)


def test_a_group_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(StreamsUnusable, match="not finite"):
        group_advantages((1.0, float("nan")))


def test_a_group_is_complete_when_no_verdict_can_still_come() -> None:
    assert is_complete((1.0, 0.0), session_closed=False)
    assert not is_complete((1.0, None), session_closed=False)
    assert is_complete((1.0, None), session_closed=True)


def test_a_reply_cut_by_length_loses_one_whatever_its_length() -> None:
    assert overlong_penalty(10, limit_tokens=1000, cache_tokens=200, cut_by_length=True) == -1.0


@pytest.mark.parametrize(("limit", "cache"), [(100, 0), (100, 101), (100, -1)])
def test_a_slope_that_does_not_fit_is_refused(limit: int, cache: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        overlong_penalty(1, limit_tokens=limit, cache_tokens=cache, cut_by_length=False)


def test_outcome_and_process_count_alone_where_the_other_is_not_known() -> None:
    assert integrated_reward(-1, None) == -1.0
    assert integrated_reward(None, process_reward(0.25, process_weight=2.0)) == 0.5
    assert integrated_reward(None, None) is None


@pytest.mark.parametrize(("votes", "rate"), [(-1, 0.5), (3, 1.1), (3, -0.1)])
def test_a_bound_for_impossible_rates_is_refused(votes: int, rate: float) -> None:
    with pytest.raises(ValueError, match="votes at rates"):
        precision_bound(votes, true_positive_rate=rate, true_negative_rate=0.5)


def test_the_baseline_is_the_mean_of_earlier_verdicts() -> None:
    mean = RunningMean()
    assert mean.relative(-1.0) == -1.0
    mean = mean.including(1.0).including(1.0).including(-1.0)
    assert mean.relative(1.0) == pytest.approx(1 - 1 / 3)


def test_negative_advantages_shrink_for_unlikely_tokens_and_positive_ones_stay() -> None:
    behaviour_T = torch.tensor([1.0, 0.25, 0.01]).log()
    streams = Streams(response_mask_T=torch.ones(3, dtype=torch.bool), behaviour_logprob_T=behaviour_T)
    for share, blame in ((0.0, [-1.0, -1.0, -1.0]), (0.5, [-1.0, -0.625, -0.505]), (1.0, [-1.0, -0.25, -0.01])):
        blamed_T = with_advantage(streams, -1.0, Advantage(spare_unlikely=share)).advantage_T
        praised_T = with_advantage(streams, 1.0, Advantage(spare_unlikely=share)).advantage_T
        assert blamed_T is not None
        assert praised_T is not None
        assert blamed_T.tolist() == pytest.approx(blame)
        assert praised_T.tolist() == [1.0, 1.0, 1.0]


def test_the_sum_of_gap_and_verdict_is_downweighted_once() -> None:
    streams = Streams(
        response_mask_T=torch.ones(2, dtype=torch.bool),
        behaviour_logprob_T=torch.tensor([0.5, 0.5]).log(),
        answered_logprob_T=torch.tensor([0.5, 0.5]).log(),
        teacher_logprob_T=torch.tensor([0.25, 1.0]).log(),
    )
    advantage_T = with_advantage(streams, -0.1, Advantage(spare_unlikely=1.0)).advantage_T
    assert advantage_T is not None
    gap = torch.tensor(2.0).log().item()
    assert advantage_T.tolist() == pytest.approx([(-0.1 - gap) / 2, gap - 0.1])
