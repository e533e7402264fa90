"""Rewards of episodes and groups, staleness, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.algorithms.advantages import with_advantage
from clawloop.core.algorithms.losses import Clip, Divisor, sample_metrics, step_loss
from clawloop.core.algorithms.rewards import (
    RunningMean,
    episode_advantages,
    group_advantages,
    has_drifted,
    integrated_reward,
    is_complete,
    is_stale,
    needed_rewards,
    overlong_penalty,
    process_reward,
    step_advantages,
    versions_apart,
)
from clawloop.core.algorithms.scoring import Scores
from clawloop.core.algorithms.streams import Streams
from clawloop.core.contracts.training import SampleMetrics
from clawloop.core.errors import StreamsUnusable
from clawloop.core.recipes.recipe import Advantage, Bounds, Train

# Group advantages, overlong penalty, outcome and process, running mean and downweighting.


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


# Advantages of episodes, against values computed by hand.


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


def test_a_reward_that_is_not_finite_is_an_error_also_where_nothing_is_compared_with_it() -> None:
    with pytest.raises(StreamsUnusable, match="not finite"):
        step_advantages([[1, math.inf], [0]])


def test_turns_are_compared_with_turns_of_the_same_index() -> None:
    found = step_advantages([[1, 2], [0, 2, 5], None, [0.5]])
    assert found is not None
    first, second, missing, short = found
    assert first[0] == pytest.approx(math.sqrt(1.5))
    assert first[1:] == (None,)  # both second turns have the same reward
    assert second[0] == pytest.approx(-math.sqrt(1.5))
    assert second[1:] == (None, 5)  # nobody else has a third turn: its reward as it is
    assert missing == ()
    assert short == (None,)  # the mean itself


# Staleness of samples, and when they expire.

# 0 → 1 → 2 → 3 → 4, then rolled back to 2: 2 → 5 → 6.
PARENTS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5}


@pytest.mark.parametrize(("version", "head", "apart"), [(4, 4, 0), (0, 4, 4), (2, 6, 2), (4, 6, 4), (4, 2, 2)])
def test_the_distance_of_versions_is_the_number_of_steps_between_them(version: int, head: int, apart: int) -> None:
    assert versions_apart(version, head, PARENTS) == versions_apart(head, version, PARENTS) == apart


def test_an_unknown_version_raises() -> None:
    with pytest.raises(KeyError):
        versions_apart(9, 4, PARENTS)


def test_next_state_evidence_ages_and_explicit_feedback_does_not() -> None:
    assert not is_stale(4, bound=4, explicit=False)
    assert is_stale(5, bound=4, explicit=False)
    assert not is_stale(500, bound=4, explicit=True)


def test_explicit_feedback_drifts_beyond_a_mean_log_ratio_of_one() -> None:
    assert not has_drifted(1.0, bound=1.0, explicit=True)
    assert has_drifted(1.01, bound=1.0, explicit=True)
    assert not has_drifted(1.01, bound=1.0, explicit=False)


# Per-sample metrics by hand.


def test_metrics_are_over_the_trained_tokens() -> None:
    ratios = torch.tensor([1.5, 1e6, 0.5, 4.0], dtype=torch.float64)  # the second is masked out
    behaviour_T = torch.full((4,), -20.0, dtype=torch.float64)
    streams = Streams(
        response_mask_T=torch.tensor([True, False, True, True]),
        behaviour_logprob_T=behaviour_T,
        advantage_T=torch.tensor([1.0, 1.0, 1.0, -1.0]),
        reference_logprob_T=behaviour_T,
    )
    scores = Scores(logprob_T=behaviour_T + ratios.log(), entropy_T=torch.tensor([0.3, 9.0, 0.6, 0.9]).double())
    (found,) = step_loss([(scores, streams)], Train(), Divisor.of([streams])).metrics
    assert found.tokens == 3
    assert found.ratio_mean == pytest.approx(2.0)
    assert found.ratio_max == pytest.approx(4.0)
    assert found.mean_abs_log_ratio == pytest.approx((math.log(1.5) + math.log(2) + math.log(4)) / 3)
    assert found.clip_share == pytest.approx(2 / 3)
    k3 = [min(ratio, 2.0) * (1 / ratio - 1 + math.log(ratio)) for ratio in (1.5, 0.5, 4.0)]
    assert found.kl == pytest.approx(sum(k3) / 3)
    assert found.entropy == pytest.approx(0.6)


def test_an_unlearned_token_does_not_dominate_the_mean_distance() -> None:
    streams = Streams(
        response_mask_T=torch.tensor([True, True]),
        behaviour_logprob_T=torch.tensor([-0.7, -0.7], dtype=torch.float64),
        reference_logprob_T=torch.tensor([-0.7, -0.7], dtype=torch.float64),
    )
    found = sample_metrics(
        Scores(logprob_T=torch.tensor([-15.0, -0.7], dtype=torch.float64)), streams, Clip(), Bounds()
    )
    assert found.kl == pytest.approx(0.5, abs=1e-3)  # unweighted: 8e5


def test_one_rare_token_moves_the_mean_and_not_what_is_compared_with_the_bound() -> None:
    """As measured: k3 = 807 at one token of 40, which a good version had learned to avoid."""
    policy, base = [-7.4] + [-0.1] * 39, [-0.7] + [-0.1] * 39
    streams = Streams(
        response_mask_T=torch.ones(40, dtype=torch.bool),
        behaviour_logprob_T=torch.tensor(policy, dtype=torch.float64),
        reference_logprob_T=torch.tensor(base, dtype=torch.float64),
    )
    found = sample_metrics(Scores(logprob_T=torch.tensor(policy, dtype=torch.float64)), streams, Clip(), Bounds())
    assert found.kl is not None
    assert found.bounded_kl is not None
    assert found.kl * 40 == pytest.approx(805, abs=10)
    assert found.kl > Bounds().kl
    assert found.bounded_kl == pytest.approx(2 * Bounds().kl / 40)


def test_a_shift_of_most_tokens_exceeds_the_bound() -> None:
    moved_T = torch.full((40,), -7.4, dtype=torch.float64)
    streams = Streams(
        response_mask_T=torch.ones(40, dtype=torch.bool),
        behaviour_logprob_T=moved_T,
        reference_logprob_T=torch.full((40,), -0.7, dtype=torch.float64),
    )
    found = sample_metrics(Scores(logprob_T=moved_T), streams, Clip(), Bounds())
    assert found.bounded_kl is not None
    assert found.bounded_kl > Bounds().kl


def test_unknown_metrics_are_none() -> None:
    streams = Streams(response_mask_T=torch.tensor([True]))
    scores = Scores(logprob_T=torch.tensor([-1.0], requires_grad=True))
    assert sample_metrics(scores, streams, Clip(), Bounds()) == SampleMetrics(1, None, None, None, None, None, None)


def test_under_the_decoupled_correction_clip_share_uses_the_decoupled_ratio() -> None:
    streams = Streams(
        response_mask_T=torch.tensor([True]),
        behaviour_logprob_T=torch.tensor([-5.0]),
        prox_logprob_T=torch.tensor([-1.0]),
        advantage_T=torch.tensor([1.0]),
    )
    assert sample_metrics(Scores(logprob_T=torch.tensor([-1.0])), streams, Clip(), Bounds()).clip_share == 0.0
