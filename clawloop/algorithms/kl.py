"""The distance to the base model, per token: how far it is (k3), and the loss that keeps it small (k2).

Knows nothing about when they are used. Both speak of KL(π_θ ‖ π_ref) by tokens drawn from π_θ; ours were drawn from
μ, hence the weight. k3 estimates the distance without bias and is never negative, but its gradient is that of
KL(π_ref ‖ π_θ), weighted π_ref/π_θ: one token of a style that was unlearned outweighs a whole batch. The gradient of
k2, log(π_θ/π_ref)·∇log π_θ, is that of the distance itself, and what such a token weighs grows with the logarithm
(J. Schulman, "Approximating KL divergence", has the estimators; DeepSeek-V3.2, section 3.1, the same gradient).
"""

from __future__ import annotations

from torch import Tensor

from clawloop.algorithms.policy_gradient import ratio

# A token that was rare when sampled and is likely now must not outweigh all others.
_WEIGHT_LIMIT = 2.0


def kl_loss(logprob_T: Tensor, behaviour_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """k2 = ½·(log π_θ − log π_ref)², weighted by clip(ρ, 0, 2), ρ = π_θ/μ; the weight carries no gradient."""
    distance_T = logprob_T - reference_logprob_T
    return _weight(logprob_T, behaviour_logprob_T) * distance_T.square() / 2


def kl_distance(logprob_T: Tensor, behaviour_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """k3 = exp(d) − 1 − d, d = log π_ref − log π_θ, in nats, with the same weight; for figures, not for gradients."""
    d_T = reference_logprob_T - logprob_T
    return _weight(logprob_T, behaviour_logprob_T) * (d_T.exp() - 1 - d_T)


def _weight(logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
    return ratio(logprob_T, behaviour_logprob_T).clamp(0, _WEIGHT_LIMIT).detach()
