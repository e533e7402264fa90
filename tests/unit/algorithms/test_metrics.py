"""Per-sample metrics by hand."""

from __future__ import annotations

import math

import pytest
import torch

from clawloop.core.algorithms.losses import Clip, Divisor, sample_metrics, step_loss
from clawloop.core.algorithms.scoring import Scores
from clawloop.core.algorithms.streams import Streams
from clawloop.core.contracts.training import SampleMetrics
from clawloop.core.recipes.recipe import Bounds, Train


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
