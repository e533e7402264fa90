"""The clipped policy-gradient objective (PPO), per token.

Knows nothing about where advantages come from. The ratio is taken against the log-probs recorded when the
token was sampled, so staleness and the difference between engine and trainer are both inside it; it is never
recomputed from the weights being trained, which would freeze it at one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp of this lies far outside every clip, so no gradient is lost, and float32 stays finite.
_LOG_RATIO_LIMIT = 20.0
# The most one token's age may weigh in the decoupled objective.
_PROX_WEIGHT_LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio.

    Args:
        low: for A < 0 a ratio under 1 − low gives no more gradient.
        high: for A > 0 a ratio over 1 + high gives no more gradient; larger than `low` ("clip-higher").
        dual: for A < 0 a ratio over this gives no more gradient; without it one stale token rules the step.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0


def ratio(logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
    """ρ = π_θ/μ of each token, with the student's gradient."""
    return (logprob_T - behaviour_logprob_T).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def clipped_objective(ratio_T: Tensor, advantage_T: Tensor, clip: Clip) -> Tensor:
    """min(ρA, clip(ρ, 1 − low, 1 + high)·A), for A < 0 not below dual·A. To be made large."""
    clipped_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    objective_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    return torch.where(advantage_T < 0, torch.maximum(objective_T, clip.dual * advantage_T), objective_T)


def is_clipped(ratio_T: Tensor, advantage_T: Tensor, clip: Clip) -> Tensor:
    """True where the clip takes the gradient away; bool[T]."""
    above_T = (advantage_T > 0) & (ratio_T > 1 + clip.high)
    outside_T = (advantage_T < 0) & ((ratio_T < 1 - clip.low) | (ratio_T > clip.dual))
    return above_T | outside_T


def policy_gradient_loss(
    logprob_T: Tensor,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    clip: Clip,
    *,
    prox_logprob_T: Tensor | None = None,
) -> Tensor:
    """Minus the clipped objective of each token.

    Args:
        logprob_T: the student's, with gradient.
        behaviour_logprob_T: recorded when sampling (μ).
        advantage_T: A.
        clip: bounds of the ratio.
        prox_logprob_T: log-probs under the policy as the step began. Given, the objective is decoupled: the
            ratio is π_θ/π_prox, weighted by min(2, π_prox/μ), which carries no gradient.
    """
    if prox_logprob_T is None:
        return -clipped_objective(ratio(logprob_T, behaviour_logprob_T), advantage_T, clip)
    weight_T = ratio(prox_logprob_T, behaviour_logprob_T).clamp(max=_PROX_WEIGHT_LIMIT).detach()
    return -weight_T * clipped_objective(ratio(logprob_T, prox_logprob_T), advantage_T, clip)
