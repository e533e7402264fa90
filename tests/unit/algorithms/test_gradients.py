"""Gradient tables, and what each loss reaches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clawloop.core.algorithms.losses import (
    Clip,
    Divergence,
    is_clipped,
    kl_distance,
    kl_loss,
    kl_over_top_k,
    policy_gradient_loss,
)
from clawloop.core.algorithms.rewards import group_advantages
from clawloop.core.algorithms.scoring import Scores, score
from clawloop.core.errors import NothingToTrain
from clawloop.core.recipes.recipe import Loss, Train
from tests.unit.algorithms.cases import VOCABULARY, floats, gradients, logits_of, random_sample, scores_of
from tests.unit.algorithms.shipped import HINTED, MASK, RECIPES, gradient_of

# Each loss against finite differences in float64, and the clip's gradient region by region.

CLIP = Clip()


def drawn(seed: int, tokens: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs with gradient, recorded ones, advantages of both signs, and those as the step began."""
    generator = torch.Generator().manual_seed(seed)

    def normal(spread: float) -> Tensor:
        return spread * torch.randn(tokens, generator=generator, dtype=torch.float64)

    behaviour_T = -1.5 - normal(0.3).abs()
    logprob_T = (behaviour_T + normal(0.7)).requires_grad_()
    return logprob_T, behaviour_T, normal(1.0), behaviour_T + normal(0.4)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_policy_gradient_agrees_with_finite_differences(seed: int, decoupled: bool) -> None:
    logprob_T, behaviour_T, advantage_T, prox_T = drawn(seed)
    assert torch.autograd.gradcheck(
        lambda logprobs: policy_gradient_loss(
            logprobs, behaviour_T, advantage_T, CLIP, prox_logprob_T=prox_T if decoupled else None
        ),
        (logprob_T,),
    )


@pytest.mark.parametrize("seed", range(5))
def test_over_all_tokens_the_kl_loss_has_the_gradient_of_the_distance_to_the_base(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    own_V, base_V = (2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    own_V.requires_grad_()
    policy_V, reference_V = own_V.log_softmax(-1), base_V.log_softmax(-1)
    sampled_V = policy_V.detach()
    (wanted_V,) = torch.autograd.grad((policy_V.exp() * (policy_V - reference_V)).sum(), own_V, retain_graph=True)
    # What is drawn from the policy, each token as often as it is drawn.
    loss = (sampled_V.exp() * kl_loss(policy_V, sampled_V, reference_V)).sum()
    (found_V,) = torch.autograd.grad(loss, own_V, retain_graph=True)
    torch.testing.assert_close(found_V, wanted_V)
    estimate = (sampled_V.exp() * kl_distance(policy_V, sampled_V, reference_V)).sum()
    assert estimate.item() == pytest.approx((policy_V.exp() * (policy_V - reference_V)).sum().item())


@pytest.mark.parametrize("seed", range(5))
def test_the_kl_loss_agrees_with_finite_differences(seed: int) -> None:
    logprob_T, behaviour_T, _, reference_T = drawn(seed)
    detached_T = logprob_T.detach()  # the weight's place does not move with the gradient's

    def loss(logprobs_T: Tensor) -> Tensor:
        weight_T = (detached_T - behaviour_T).exp().clamp(max=2)
        return weight_T * (logprobs_T - reference_T) ** 2 / 2

    torch.testing.assert_close(kl_loss(logprob_T, behaviour_T, reference_T), loss(logprob_T))
    (found_T,) = torch.autograd.grad(kl_loss(logprob_T, behaviour_T, reference_T).sum(), logprob_T)
    step = 1e-6
    ups, downs = loss(detached_T + step), loss(detached_T - step)
    torch.testing.assert_close(found_T, (ups - downs) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("log_ratio", "weight"), [(-1.0, math.exp(-1.0)), (0.0, 1.0), (1.5, 2.0)])
def test_the_kl_weight_is_the_clipped_ratio_and_carries_no_gradient(log_ratio: float, weight: float) -> None:
    logprob_T = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference_T = torch.tensor([-0.4], dtype=torch.float64)
    loss_T = kl_loss(logprob_T, logprob_T.detach() - log_ratio, reference_T)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert loss_T.item() == pytest.approx(weight * 0.6**2 / 2)
    assert gradient_T.item() == pytest.approx(weight * -0.6)


def test_the_weight_of_an_unlearned_token_grows_with_the_logarithm() -> None:
    logprob_T = torch.tensor([math.log(0.01)], dtype=torch.float64, requires_grad=True)
    reference_T = torch.tensor([math.log(0.5)], dtype=torch.float64)
    (gradient_T,) = torch.autograd.grad(kl_loss(logprob_T, logprob_T.detach(), reference_T).sum(), logprob_T)
    assert gradient_T.item() == pytest.approx(-math.log(50))  # k3 would have -49


def _own(scores: Scores) -> Tensor:
    return scores.logprob_T


def _entropy(scores: Scores) -> Tensor:
    assert scores.entropy_T is not None
    return scores.entropy_T


def _tail(scores: Scores) -> Tensor:
    assert scores.tail_T is not None
    return scores.tail_T


@pytest.mark.parametrize("pick", [_own, _entropy, _tail])
@pytest.mark.parametrize("seed", range(3))
def test_scores_agree_with_finite_differences(pick: Callable[[Scores], Tensor], seed: int) -> None:
    sample = random_sample(random.Random(seed))
    assert torch.autograd.gradcheck(lambda logits_TV: pick(scores_of(sample, logits_TV)), (logits_of(sample),))


DIVERGENCES: list[Divergence] = ["reverse", "forward"]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("seed", range(5))
def test_top_k_distillation_agrees_with_finite_differences(seed: int, divergence: Divergence) -> None:
    sample = random_sample(random.Random(seed))
    teacher_TK, teacher_tail_T = floats(sample.topk_logprobs), floats(sample.tail)
    assert teacher_TK is not None
    assert teacher_tail_T is not None

    def loss(logits_TV: Tensor) -> Tensor:
        scores = scores_of(sample, logits_TV)
        assert scores.topk_logprobs_TK is not None
        return kl_over_top_k(scores.topk_logprobs_TK, _tail(scores), teacher_TK, teacher_tail_T, divergence)

    assert torch.autograd.gradcheck(loss, (logits_of(sample),))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_top_k_distillation_is_the_whole_kl_when_one_id_is_left_for_the_tail(divergence: Divergence) -> None:
    generator = torch.Generator().manual_seed(1)
    student_TV, teacher_TV = (torch.randn(4, VOCABULARY, generator=generator).double() for _ in range(2))
    ids_TK = torch.arange(VOCABULARY - 1).expand(4, -1)
    own_T = torch.zeros(4, dtype=torch.int64)
    student = score(student_TV, own_T, temperature=1.0, topk_ids_TK=ids_TK)
    teacher = score(teacher_TV, own_T, temperature=1.0, topk_ids_TK=ids_TK)
    assert student.topk_logprobs_TK is not None
    assert teacher.topk_logprobs_TK is not None
    found_T = kl_over_top_k(
        student.topk_logprobs_TK, _tail(student), teacher.topk_logprobs_TK, _tail(teacher), divergence
    )
    p_TV, q_TV = student_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
    if divergence == "forward":
        p_TV, q_TV = q_TV, p_TV
    torch.testing.assert_close(found_T, (p_TV.exp() * (p_TV - q_TV)).sum(-1))


def test_only_the_forward_kl_relearns_a_token_the_student_no_longer_produces() -> None:
    sure_of_0_TV, sure_of_1_TV = torch.zeros(2, 1, VOCABULARY, dtype=torch.float64)
    sure_of_0_TV[0, 0] = sure_of_1_TV[0, 1] = 14.0  # e^-14 for each other id
    sure_of_0_TV.requires_grad_()
    own_T, ids_TK = torch.tensor([0]), torch.tensor([[1]])
    student = score(sure_of_0_TV, own_T, temperature=1.0, topk_ids_TK=ids_TK)
    teacher = score(sure_of_1_TV, own_T, temperature=1.0, topk_ids_TK=ids_TK)
    assert student.topk_logprobs_TK is not None
    assert teacher.topk_logprobs_TK is not None
    pulls: dict[Divergence, float] = {}
    for divergence in DIVERGENCES:
        loss = kl_over_top_k(
            student.topk_logprobs_TK, _tail(student), teacher.topk_logprobs_TK, _tail(teacher), divergence
        )
        (gradient_TV,) = torch.autograd.grad(loss.sum(), sure_of_0_TV, retain_graph=True)
        pulls[divergence] = -gradient_TV[0, 1].item()
    assert pulls["forward"] == pytest.approx(1.0, abs=1e-4)
    assert 0 < pulls["reverse"] < 1e-4


def test_a_tiny_tail_keeps_its_digits_and_its_gradient() -> None:
    logits_TV = torch.zeros(1, VOCABULARY)
    logits_TV[0, 0] = 40.0  # the others have e^-40 each: 1 - p is 0 in float32
    logits_TV.requires_grad_()
    tail_T = _tail(score(logits_TV, torch.tensor([0]), temperature=1.0, topk_ids_TK=torch.tensor([[0]])))
    (gradient_TV,) = torch.autograd.grad(tail_T.sum(), logits_TV)
    assert tail_T.item() == pytest.approx(-40 + math.log(VOCABULARY - 1))
    assert gradient_TV[0].tolist() == pytest.approx([-1.0] + [1 / (VOCABULARY - 1)] * (VOCABULARY - 1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 1.0, -1.0),
        (0.5, 1.0, -0.5),  # below the clip, but expected more: goes on
        (1.27, 1.0, -1.27),
        (1.29, 1.0, 0.0),  # expected more, and is more likely by 1.28 already
        (1.0, -1.0, 1.0),
        (0.81, -1.0, 0.81),
        (0.79, -1.0, 0.0),  # expected less, and is less likely by 0.8 already
        (2.9, -1.0, 2.9),
        (3.1, -1.0, 0.0),  # dual clip
        (1e43, -1.0, 0.0),  # infinite in float32
        (1e43, 1.0, 0.0),
    ],
)
def test_the_clip_removes_the_gradient_outside_its_bounds(ratio: float, advantage: float, gradient: float) -> None:
    logprob_T = torch.tensor([math.log(ratio) - 110.0], requires_grad=True)
    advantage_T, behaviour_T = torch.tensor([advantage]), torch.tensor([-110.0])
    loss_T = policy_gradient_loss(logprob_T, behaviour_T, advantage_T, CLIP)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert gradient_T.item() == pytest.approx(gradient, rel=1e-4)
    assert is_clipped(torch.tensor([ratio]), advantage_T, CLIP).item() == (gradient == 0.0)


def test_the_decoupled_weight_is_clipped_at_two() -> None:
    prox_T, advantage_T = torch.tensor([-1.0]), torch.tensor([0.5])
    for age, weight in ((0.0, 1.0), (0.5, math.exp(0.5)), (3.0, 2.0)):
        loss_T = policy_gradient_loss(prox_T, prox_T - age, advantage_T, CLIP, prox_logprob_T=prox_T)
        assert loss_T.item() == pytest.approx(-weight * 0.5)


# Each recipe of deploy/recipes gives a gradient to exactly the expected tokens.

LEARNS_FROM = {
    "binary": {"verdict"},
    "combined": {"verdict", "hint"},
    "demo": {"verdict", "hint"},
    "grpo": {"verdict"},
    "hindsight": {"verdict", "hint"},
    "hybrid": {"verdict", "hint"},
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
    # Less its mean, the gap is not 0 where the teacher does not differ.
    taught = range(len(MASK)) if train.advantage.centre_gap else HINTED
    if reward and "verdict" in learns_from:
        assert rows(gradient_of(train, reward=reward, hint=hint)) == [t for t, on in enumerate(MASK) if on]
    elif hint and "hint" in learns_from:
        assert rows(gradient_of(train, reward=reward, hint=hint)) == [t for t in taught if MASK[t]]
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
