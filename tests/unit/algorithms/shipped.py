"""The recipes of deploy/recipes, each on the same sample."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from clawloop.core.algorithms.advantages import support_advantage, with_advantage
from clawloop.core.algorithms.losses import Divisor, step_loss
from clawloop.core.algorithms.scoring import most_likely, score
from clawloop.core.algorithms.streams import Streams
from clawloop.core.recipes.recipe import Train, load_recipe
from tests.unit.algorithms.cases import VOCABULARY, K

RECIPES = {
    path.stem: load_recipe(path) for path in sorted((Path(__file__).parents[3] / "deploy/recipes").glob("*.toml"))
}
MASK = [True, True, False, True, True, True]
HINTED = [1, 2, 4]  # positions at which the teacher differs; 2 is masked


def gradient_of(train: Train, *, reward: float | None, hint: bool, engine_below: float = 0.0) -> Tensor:
    """[T, V]: how a recipe would change the logits of one sample on policy, whose KL is not asked for.

    Args:
        train: the recipe's.
        reward: of the sample's verdict.
        hint: the sample has one.
        engine_below: nats by which the engine's log-probs are below the trainer's.

    Raises:
        NothingToTrain: the recipe learns nothing from it.
    """
    generator = torch.Generator().manual_seed(5)
    logits_TV = torch.randn(len(MASK), VOCABULARY, generator=generator, dtype=torch.float64)
    ids_T = torch.randint(VOCABULARY, (len(MASK),), generator=generator)
    teacher_TV = logits_TV.clone()
    teacher_TV[HINTED] += torch.randn(len(HINTED), VOCABULARY, generator=generator, dtype=torch.float64)
    logits_TV.requires_grad_()
    whose_TV = teacher_TV if train.distillation.top_k_of == "teacher" else logits_TV
    topk_ids_TK = most_likely(whose_TV, K) if train.loss.distillation else None
    student = score(logits_TV, ids_T, temperature=0.6, topk_ids_TK=topk_ids_TK)
    teacher = score(teacher_TV, ids_T, temperature=0.6, topk_ids_TK=topk_ids_TK)
    within_TK, gap_clip = torch.ones(len(MASK), K, dtype=torch.bool), train.advantage.opd_clip
    centred_T = torch.tensor(MASK) if train.advantage.centre_gap else None
    own_TK = None if student.topk_logprobs_TK is None else student.topk_logprobs_TK.detach()
    advantage_TK = None
    if own_TK is not None and teacher.topk_logprobs_TK is not None:
        advantage_TK = support_advantage(teacher.topk_logprobs_TK, own_TK, within_TK, gap_clip, centred_T)
    streams = Streams(
        answered_topk_logprobs_TK=own_TK if hint else None,
        topk_advantage_TK=advantage_TK if hint else None,
        response_mask_T=torch.tensor(MASK),
        behaviour_logprob_T=student.logprob_T.detach() - engine_below,
        prox_logprob_T=student.logprob_T.detach(),
        teacher_logprob_T=teacher.logprob_T if hint else None,
        answered_logprob_T=student.logprob_T.detach() if hint else None,
        teacher_topk_ids_TK=topk_ids_TK if hint else None,
        teacher_topk_logprobs_TK=teacher.topk_logprobs_TK if hint else None,
        teacher_tail_T=teacher.tail_T if hint else None,
    )
    streams = with_advantage(streams, reward, train.advantage)
    loss = step_loss([(student, streams)], train, Divisor.of([streams])).loss
    gradient_TV: Tensor = torch.autograd.grad(loss, logits_TV)[0]
    return gradient_TV
