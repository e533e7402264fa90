"""Every worked example of the article, to the digits it prints."""

from __future__ import annotations

import pytest
import torch

from clawloop.core.algorithms.advantages import teacher_gap, with_advantage
from clawloop.core.algorithms.losses import Clip, clipped_objective, policy_gradient_loss
from clawloop.core.algorithms.rewards import (
    group_advantages,
    integrated_reward,
    judge_consistency,
    overlong_penalty,
    process_reward,
)
from clawloop.core.algorithms.streams import Streams
from clawloop.core.judging.voting import majority
from clawloop.core.recipes.recipe import Advantage


def test_a_group_of_four_rewards_gives_the_articles_advantages() -> None:
    advantages = group_advantages((1, -1, 1, 0))
    assert [f"{advantage:.2f}" for advantage in advantages if advantage is not None] == [
        "0.90",
        "-1.51",
        "0.90",
        "-0.30",
    ]


def test_the_clip_limits_a_ratio_of_1_4_to_a_contribution_of_1_15() -> None:
    clip = Clip(low=0.2, high=0.28)
    objective = clipped_objective(torch.tensor([1.4]).double(), torch.tensor([0.9]).double(), clip)
    assert f"{objective.item():.2f}" == "1.15"
    behaviour_T = torch.tensor([-2.0]).double()
    loss = policy_gradient_loss(
        behaviour_T + torch.tensor([1.4]).log(), behaviour_T, torch.tensor([0.9]).double(), clip
    )
    assert loss.item() == pytest.approx(-1.28 * 0.9)


def test_the_teacher_gap_is_1_8_or_minus_0_2() -> None:
    streams = Streams(
        response_mask_T=torch.tensor([True, True]),
        answered_logprob_T=torch.tensor([-2.3, -1.0]),
        teacher_logprob_T=torch.tensor([-0.5, -1.2]),
    )
    advantage_T = with_advantage(streams, None, Advantage()).advantage_T
    assert advantage_T is not None
    assert advantage_T.tolist() == pytest.approx([1.8, -0.2], abs=1e-6)


def test_a_gap_beyond_two_is_clipped() -> None:
    gap_T = teacher_gap(torch.tensor([-0.1, -9.0]), torch.tensor([-8.0, -0.5]), 2.0)
    assert gap_T.tolist() == [2.0, -2.0]


@pytest.mark.parametrize(("tokens", "penalty"), [(700, 0.0), (800, 0.0), (900, -0.5), (1000, -1.0), (1100, -1.0)])
def test_a_reply_of_700_900_and_1100_tokens_loses_0_a_half_and_1(tokens: int, penalty: float) -> None:
    found = overlong_penalty(tokens, limit_tokens=1000, cache_tokens=200, cut_by_length=False)
    assert found == pytest.approx(penalty, abs=1e-12)


def test_a_success_with_two_good_votes_of_three_earns_1_33() -> None:
    expected = majority((1, 1, -1)).expected
    assert expected is not None
    reward = integrated_reward(1, process_reward(expected, process_weight=1.0))
    assert reward is not None
    assert f"{reward:.2f}" == "1.33"
    assert f"{judge_consistency(reward, 1):.2f}" == "1.33"
    assert f"{judge_consistency(reward, -1):.2f}" == "-1.33"
