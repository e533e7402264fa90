"""Each recipe of deploy/recipes changes the logits of exactly the tokens it should."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clawloop.algorithms.advantages import with_advantage
from clawloop.algorithms.aggregation import Divisor
from clawloop.algorithms.groups import group_advantages
from clawloop.algorithms.losses import LossPlan, step_loss
from clawloop.algorithms.scoring import most_likely, score
from clawloop.algorithms.streams import Streams
from clawloop.errors import NothingToTrain
from clawloop.recipe import Recipe, load_recipe
from clawloop.training.step import loss_plan
from tests.unit.algorithms.cases import VOCABULARY, gradients, random_sample

RECIPES = Path(__file__).parents[3] / "deploy" / "recipes"
MASK = [True, True, False, True, True, True]
HINTED = [1, 2, 4]  # positions at which the teacher differs; 2 is masked


def recipe(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.toml")


def without_kl(recipe: Recipe) -> LossPlan:
    return replace(loss_plan(recipe.train), kl=0.0)


def reached(name: str, *, reward: float | None, hint: bool) -> list[int]:
    """Positions whose logits the recipe's signal would change, for one on-policy sample; without KL."""
    settings = recipe(name).train
    generator = torch.Generator().manual_seed(5)
    logits_TV = torch.randn(len(MASK), VOCABULARY, generator=generator, dtype=torch.float64)
    ids_T = torch.randint(VOCABULARY, (len(MASK),), generator=generator)
    teacher_TV = logits_TV.clone()
    teacher_TV[HINTED] += torch.randn(len(HINTED), VOCABULARY, generator=generator, dtype=torch.float64)
    logits_TV.requires_grad_()
    topk_ids_TK = most_likely(logits_TV, 3) if settings.loss.distillation else None
    student = score(logits_TV, ids_T, temperature=0.6, topk_ids_TK=topk_ids_TK)
    teacher = score(teacher_TV, ids_T, temperature=0.6, topk_ids_TK=topk_ids_TK)
    streams = Streams(
        response_mask_T=torch.tensor(MASK),
        behaviour_logprob_T=student.logprob_T.detach(),
        teacher_logprob_T=teacher.logprob_T if hint else None,
        teacher_topk_ids_TK=topk_ids_TK if hint else None,
        teacher_topk_logprobs_TK=teacher.topk_logprobs_TK if hint else None,
        teacher_tail_T=teacher.tail_T if hint else None,
    )
    weights = settings.advantage
    streams = with_advantage(
        streams,
        reward,
        verdict_weight=weights.verdict_weight,
        teacher_weight=weights.teacher_weight,
        gap_clip=weights.opd_clip,
    )
    loss = step_loss([(student, streams)], without_kl(recipe(name)), Divisor.of([streams])).loss
    return rows(torch.autograd.grad(loss, logits_TV)[0])


def rows(gradient_TV: Tensor) -> list[int]:
    return (gradient_TV.abs().sum(dim=-1) > 1e-12).nonzero().squeeze(-1).tolist()


@pytest.mark.parametrize(
    ("name", "reward", "hint", "expected"),
    [
        ("binary", 1.0, False, [0, 1, 3, 4, 5]),
        ("binary", -1.0, True, [0, 1, 3, 4, 5]),
        ("outcome_process", 1.33, False, [0, 1, 3, 4, 5]),
        ("grpo", -1.51, False, [0, 1, 3, 4, 5]),
        ("opd", None, True, [1, 4]),
        ("opd", -1.0, True, [1, 4]),  # its verdict has no weight
        ("combined", None, True, [1, 4]),
        ("combined", 0.0, True, [1, 4]),
        ("combined", -1.0, True, [0, 1, 3, 4, 5]),
        ("combined", 1.0, False, [0, 1, 3, 4, 5]),
        ("topk", None, True, [1, 4]),
    ],
)
def test_a_recipe_changes_exactly_the_tokens_it_learns_about(
    name: str, reward: float | None, hint: bool, expected: list[int]
) -> None:
    assert reached(name, reward=reward, hint=hint) == expected


@pytest.mark.parametrize(
    ("name", "reward", "hint"),
    [
        ("binary", 0.0, True),
        ("binary", None, True),
        ("opd", 1.0, False),
        ("topk", 1.0, False),
        ("combined", 0.0, False),
    ],
)
def test_a_sample_a_recipe_learns_nothing_from_is_refused(name: str, reward: float | None, hint: bool) -> None:
    with pytest.raises(NothingToTrain, match="neither an advantage"):
        reached(name, reward=reward, hint=hint)


def test_a_constant_group_reaches_no_token() -> None:
    assert group_advantages((1, 1, 1)) == (None, None, None)


def test_the_kl_reaches_the_tokens_the_policy_has_moved_at_and_entropy_all_of_them() -> None:
    sample = random_sample(random.Random(2), tokens=6, topk=False)
    sample.mask = MASK
    sample.advantage = [0.0] * 6
    assert rows(gradients([sample], LossPlan(kl=0.02))[0]) == [0, 1, 3, 4, 5]
    assert rows(gradients([sample], LossPlan(kl=0.0, entropy=0.01))[0]) == [0, 1, 3, 4, 5]
    assert rows(gradients([sample], LossPlan(kl=0.0))[0]) == []


def test_a_clipped_token_is_not_reached_and_its_neighbours_are() -> None:
    sample = random_sample(random.Random(4), tokens=3, masked=False, topk=False, reference=False)
    sample.advantage = [1.0, 1.0, 1.0]
    sample.behaviour = [-20.0, -0.001, -20.0]  # ratios far above, below and above the clip
    assert rows(gradients([sample], LossPlan())[0]) == [1]
