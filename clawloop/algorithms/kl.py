"""The distance to the base model, per token: the k3 estimator of KL(π_θ ‖ π_ref).

Knows nothing about when it is used. k3 is unbiased for tokens drawn from π_θ; ours were drawn from μ, hence
the weight.
"""

from __future__ import annotations

from torch import Tensor

from clawloop.algorithms.policy_gradient import ratio

# A token that was rare when sampled and is likely now must not outweigh all others.
_WEIGHT_LIMIT = 2.0


def k3(logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """exp(d) − 1 − d with d = log π_ref − log π_θ; never negative."""
    d_T = reference_logprob_T - logprob_T
    return d_T.exp() - 1 - d_T


def kl_loss(logprob_T: Tensor, behaviour_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """k3 weighted by clip(ρ, 0, 2), ρ = π_θ/μ; the weight carries no gradient."""
    weight_T = ratio(logprob_T, behaviour_logprob_T).clamp(0, _WEIGHT_LIMIT).detach()
    return weight_T * k3(logprob_T, reference_logprob_T)
