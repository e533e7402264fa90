"""Random samples, in the plain form and as tensors in float64."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from clawloop.core.algorithms.advantages import support_advantage
from clawloop.core.algorithms.losses import Divisor, StepLoss, step_loss
from clawloop.core.algorithms.scoring import Scores, score
from clawloop.core.algorithms.streams import Streams
from clawloop.core.recipes.recipe import Advantage, Distillation, Loss, Train
from tests.unit.algorithms.plain import PlainPlan, PlainSample, log_softmax

VOCABULARY = 7
K = 3


def random_sample(
    rng: random.Random,
    *,
    tokens: int = 5,
    masked: bool = True,
    advantage: bool = True,
    reference: bool = True,
    prox: bool = True,
    topk: bool = True,
    hint: bool = False,
) -> PlainSample:
    """A sample whose recorded log-probs come from other weights than its logits: ratios are off 1."""

    def logits() -> list[list[float]]:
        return [[rng.gauss(0, 1.2) for _ in range(VOCABULARY)] for _ in range(tokens)]

    def near(base: list[list[float]], spread: float) -> list[list[float]]:
        return [[value + rng.gauss(0, spread) for value in row] for row in base]

    own = logits()
    ids = [rng.randrange(VOCABULARY) for _ in range(tokens)]
    temperature = rng.choice([0.6, 1.0, 1.3])

    def chosen(other: list[list[float]]) -> list[float]:
        return [log_softmax(row, temperature)[token] for row, token in zip(other, ids, strict=True)]

    mask = [not masked or rng.random() < 0.7 for _ in range(tokens)]
    mask[rng.randrange(tokens)] = True
    sample = PlainSample(own, ids, mask, temperature, behaviour=chosen(near(own, 0.5)))
    if advantage:
        sample.advantage = [rng.choice([-1, 1]) * rng.uniform(0.1, 2) for _ in range(tokens)]
    if reference:
        sample.reference = chosen(near(own, 0.4))
    if prox:
        sample.prox = chosen(near(own, 0.5))
    if topk:
        teacher = [log_softmax(row, temperature) for row in near(own, 0.7)]
        sample.topk_ids = [rng.sample(range(VOCABULARY), K) for _ in range(tokens)]
        sample.topk_logprobs = [
            [row[token] for token in ids] for row, ids in zip(teacher, sample.topk_ids, strict=True)
        ]
        sample.tail = [
            float(torch.tensor([p for token, p in enumerate(row) if token not in ids]).double().logsumexp(0))
            for row, ids in zip(teacher, sample.topk_ids, strict=True)
        ]
        before = [log_softmax(row, temperature) for row in near(own, 0.5)]
        sample.answered_topk = [[row[token] for token in ids] for row, ids in zip(before, sample.topk_ids, strict=True)]
        sample.within = [[rng.random() < 0.7 for _ in range(K)] for _ in range(tokens)]
    if hint:
        sample.teacher = chosen(near(own, 1.5))
        sample.answered = chosen(near(own, 0.5))
    return sample


def floats(values: list[float] | list[list[float]] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def streams_of(sample: PlainSample, gap_clip: float = 1.0, *, centred: bool = False) -> Streams:
    teacher_TK, answered_TK = floats(sample.topk_logprobs), floats(sample.answered_topk)
    advantage_TK = None
    if teacher_TK is not None and answered_TK is not None:
        centred_T = torch.tensor(sample.mask) if centred else None
        advantage_TK = support_advantage(teacher_TK, answered_TK, torch.tensor(sample.within), gap_clip, centred_T)
    return Streams(
        answered_topk_logprobs_TK=answered_TK,
        topk_advantage_TK=advantage_TK,
        response_mask_T=torch.tensor(sample.mask),
        behaviour_logprob_T=floats(sample.behaviour),
        advantage_T=floats(sample.advantage),
        teacher_logprob_T=floats(sample.teacher),
        answered_logprob_T=floats(sample.answered),
        reference_logprob_T=floats(sample.reference),
        prox_logprob_T=floats(sample.prox),
        teacher_topk_ids_TK=None if sample.topk_ids is None else torch.tensor(sample.topk_ids),
        teacher_topk_logprobs_TK=floats(sample.topk_logprobs),
        teacher_tail_T=floats(sample.tail),
    )


def logits_of(sample: PlainSample) -> Tensor:
    return torch.tensor(sample.logits, dtype=torch.float64, requires_grad=True)


def scores_of(sample: PlainSample, logits_TV: Tensor, *, entropy: bool = True) -> Scores:
    return score(
        logits_TV,
        torch.tensor(sample.ids),
        temperature=sample.temperature,
        topk_ids_TK=None if sample.topk_ids is None else torch.tensor(sample.topk_ids),
        entropy=entropy,
    )


def run(batch: list[PlainSample], logits: list[Tensor], recipe: Train, divisor: Divisor | None = None) -> StepLoss:
    """The loss of these samples; of a whole step unless a divisor is given."""
    weights = recipe.advantage
    streams = [streams_of(sample, weights.opd_clip, centred=weights.centre_gap) for sample in batch]
    pairs = [
        (scores_of(sample, logits_TV), stream) for sample, logits_TV, stream in zip(batch, logits, streams, strict=True)
    ]
    return step_loss(pairs, recipe, divisor or Divisor.of(streams))


def gradients(batch: list[PlainSample], recipe: Train) -> list[Tensor]:
    """d loss / d logits of each sample."""
    logits = [logits_of(sample) for sample in batch]
    return list(torch.autograd.grad(run(batch, logits, recipe).loss, logits))


def as_recipe(plan: PlainPlan) -> Train:
    return Train(
        loss=Loss(
            policy_gradient=plan.policy_gradient,
            distillation=plan.distillation,
            kl=plan.kl,
            entropy=plan.entropy,
            clip_low=plan.low,
            clip_high=plan.high,
            dual_clip=plan.dual,
            correction="decoupled" if plan.decoupled else "none",
            aggregation="sequence" if plan.sequence else "token",
        ),
        advantage=Advantage(opd_clip=plan.gap_clip, centre_gap=plan.centred),
        distillation=Distillation(divergence="clipped" if plan.clipped else "forward" if plan.forward else "reverse"),
    )
