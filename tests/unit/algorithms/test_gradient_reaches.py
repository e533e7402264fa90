"""Each recipe of deploy/recipes gives a gradient to exactly the expected tokens."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from clawloop.core.algorithms.rewards import group_advantages
from clawloop.core.errors import NothingToTrain
from clawloop.core.recipes.recipe import Loss, Train
from tests.unit.algorithms.cases import gradients, random_sample
from tests.unit.algorithms.shipped import HINTED, MASK, RECIPES, gradient_of

LEARNS_FROM = {
    "binary": {"verdict"},
    "combined": {"verdict", "hint"},
    "demo": {"verdict", "hint"},
    "grpo": {"verdict"},
    "judge": {"verdict"},
    "opd": {"hint"},
    "outcome_process": {"verdict"},
    "quantised": {"verdict", "hint"},
    "topk": {"hint"},
}


def rows(gradient_TV: Tensor) -> list[int]:
    return (gradient_TV.abs().sum(dim=-1) > 1e-12).nonzero().squeeze(-1).tolist()


@pytest.mark.parametrize("hint", [True, False], ids=["hint", "no hint"])
@pytest.mark.parametrize("reward", [None, 0.0, 1.0, -1.33])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_a_gradient_to_exactly_the_expected_tokens(name: str, reward: float | None, hint: bool) -> None:
    train, learns_from = RECIPES[name].train, LEARNS_FROM[name]
    if reward and "verdict" in learns_from:
        assert rows(gradient_of(train, reward=reward, hint=hint)) == [t for t, on in enumerate(MASK) if on]
    elif hint and "hint" in learns_from:
        assert rows(gradient_of(train, reward=reward, hint=hint)) == [t for t in HINTED if MASK[t]]
    else:
        with pytest.raises(NothingToTrain, match="neither an advantage"):
            gradient_of(train, reward=reward, hint=hint)


def test_a_constant_group_gives_no_gradient() -> None:
    assert group_advantages((1, 1, 1)) == (None, None, None)


def test_the_kl_gives_a_gradient_to_moved_tokens_and_entropy_to_all() -> None:
    sample = random_sample(random.Random(2), tokens=6, topk=False)
    sample.mask = MASK
    sample.advantage = [0.0] * 6
    assert rows(gradients([sample], Train(loss=Loss(kl=0.02)))[0]) == [0, 1, 3, 4, 5]
    assert rows(gradients([sample], Train(loss=Loss(kl=0.0, entropy=0.01)))[0]) == [0, 1, 3, 4, 5]
    assert rows(gradients([sample], Train(loss=Loss(kl=0.0)))[0]) == []


def test_a_clipped_token_has_no_gradient_and_its_neighbours_have() -> None:
    sample = random_sample(random.Random(4), tokens=3, masked=False, topk=False, reference=False)
    sample.advantage = [1.0, 1.0, 1.0]
    sample.behaviour = [-20.0, -0.001, -20.0]  # ratios far above, below and above the clip
    assert rows(gradients([sample], Train())[0]) == [1]
