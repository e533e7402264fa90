"""The clipped policy-gradient objective per token: PPO (arXiv 1707.06347) with clip-higher and dual clip.

The ratio is taken against the log-probs recorded when the token was sampled, so it corrects for staleness and for the
difference between engine and trainer. The denominator is never recomputed from the weights being trained, which would
fix the ratio at one. Dimension suffix: `_T` response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) lies far outside every clip, so no gradient is lost, and float32 stays finite.
_LOG_RATIO_LIMIT = 20.0
# Largest weight of one token's staleness in the decoupled objective.
_PROX_WEIGHT_LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio outside which a token has no gradient.

    Args:
        low: for A < 0, ratios below 1 − low.
        high: for A > 0, ratios above 1 + high; larger than `low` ("clip-higher", DAPO, arXiv 2503.14476).
        dual: for A < 0, ratios above this (dual clip, arXiv 1912.09729); without it one stale token dominates the step.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0


def ratio(logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
    """float[T], ρ = π_θ/μ of each token, with the gradient of `logprob_T`."""
    return (logprob_T - behaviour_logprob_T).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def clipped_objective(ratio_T: Tensor, advantage_T: Tensor, clip: Clip) -> Tensor:
    """float[T], min(ρA, clip(ρ, 1 − low, 1 + high)·A), and for A < 0 at least dual·A; to be maximised."""
    clipped_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    objective_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    return torch.where(advantage_T < 0, torch.maximum(objective_T, clip.dual * advantage_T), objective_T)


def is_clipped(ratio_T: Tensor, advantage_T: Tensor, clip: Clip) -> Tensor:
    """bool[T]; True = the clip removes the token's gradient."""
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
    """Minus the clipped objective of each token, float[T].

    Args:
        logprob_T: float[T], the student's, with gradient.
        behaviour_logprob_T: float[T], recorded when sampling (log μ).
        advantage_T: float[T], A.
        clip: bounds of the ratio.
        prox_logprob_T: float[T], log-probs under the policy as the step began. If given, the objective is decoupled:
            the ratio is π_θ/π_prox, weighted by min(2, π_prox/μ), which carries no gradient.
    """
    if prox_logprob_T is None:
        return -clipped_objective(ratio(logprob_T, behaviour_logprob_T), advantage_T, clip)
    weight_T = ratio(prox_logprob_T, behaviour_logprob_T).clamp(max=_PROX_WEIGHT_LIMIT).detach()
    return -weight_T * clipped_objective(ratio(logprob_T, prox_logprob_T), advantage_T, clip)
