"""A learned preference and a hint about another one: teacher `policy` leaves it, teacher `base` undoes it.

A model of two tokens, each drawn from two alternatives: the first shows a preference learned before, the
second the one the hint is about. The hint moves the second only, as a perfect hint would.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clawloop.algorithms.advantages import with_advantage
from clawloop.algorithms.aggregation import Divisor
from clawloop.algorithms.losses import LossPlan, step_loss
from clawloop.algorithms.scoring import score
from clawloop.algorithms.streams import Streams

pytestmark = pytest.mark.slow

BASE_TV = torch.zeros(2, 2, dtype=torch.float64)
LEARNED_TV = torch.tensor([[3.0, 0.0], [0.0, 0.0]], dtype=torch.float64)  # 0.95 for the learned token
HINT_TV = torch.tensor([[0.0, 0.0], [3.0, 0.0]], dtype=torch.float64)


def learned_and_hinted(logits_TV: Tensor) -> tuple[float, float]:
    learned, hinted = logits_TV.softmax(-1)[:, 0].tolist()
    return learned, hinted


def distilled(teacher: str, *, steps: int = 60, samples: int = 16) -> tuple[float, float]:
    """Probabilities of the learned and of the hinted token after on-policy distillation from hints."""
    generator = torch.Generator().manual_seed(0)
    policy_TV = LEARNED_TV.clone().requires_grad_()
    for _ in range(steps):
        teacher_TV = (policy_TV.detach() if teacher == "policy" else BASE_TV) + HINT_TV
        batch = []
        for _ in range(samples):
            ids_T = torch.multinomial(policy_TV.detach().softmax(-1), 1, generator=generator).squeeze(-1)
            student = score(policy_TV, ids_T, temperature=1.0)
            streams = Streams(
                response_mask_T=torch.tensor([True, True]),
                behaviour_logprob_T=student.logprob_T.detach(),
                teacher_logprob_T=score(teacher_TV, ids_T, temperature=1.0).logprob_T,
            )
            batch.append((student, with_advantage(streams, None)))
        divisor = Divisor.of(streams for _, streams in batch)
        loss = step_loss(batch, LossPlan(kl=0.0), divisor).loss
        (gradient_TV,) = torch.autograd.grad(loss, policy_TV)
        policy_TV = (policy_TV - 2.0 * gradient_TV).detach().requires_grad_()
    return learned_and_hinted(policy_TV)


def test_the_policy_as_its_own_teacher_keeps_what_it_learned() -> None:
    before, _ = learned_and_hinted(LEARNED_TV)
    learned, hinted = distilled("policy")
    assert abs(learned - before) < 0.05
    assert hinted > 0.9


def test_the_base_as_teacher_pulls_what_was_learned_back() -> None:
    before, _ = learned_and_hinted(LEARNED_TV)
    learned, hinted = distilled("base")
    assert before - learned > 0.05
    assert hinted > 0.9
