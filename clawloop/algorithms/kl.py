"""Distance to the base model per token: k3 as the reported figure, k2 as the loss that keeps it small.

Both estimate KL(π_θ ‖ π_ref) from tokens drawn from π_θ; here tokens were drawn from μ, hence the weight. k3 is an
unbiased estimate and never negative, but its gradient is that of KL(π_ref ‖ π_θ), weighted π_ref/π_θ: one token of a
style that was unlearned outweighs a whole batch. The gradient of k2, log(π_θ/π_ref)·∇log π_θ, is that of the distance
itself, and such a token's weight grows with the logarithm only (J. Schulman, "Approximating KL divergence", defines
k1, k2 and k3; DeepSeek-V3.2, section 3.1, has the same gradient).
"""

from __future__ import annotations

from torch import Tensor

from clawloop.algorithms.policy_gradient import ratio

# A token that was unlikely when sampled and is likely now must not outweigh all others.
_WEIGHT_LIMIT = 2.0


def kl_loss(logprob_T: Tensor, behaviour_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """k2 = ½·(log π_θ − log π_ref)², weighted by clip(ρ, 0, 2), ρ = π_θ/μ; the weight carries no gradient.

    Args:
        logprob_T: float[T], the student's, with gradient.
        behaviour_logprob_T: float[T], log μ.
        reference_logprob_T: float[T], the base model's.

    Returns:
        float[T], with gradient.
    """
    distance_T = logprob_T - reference_logprob_T
    return _weight(logprob_T, behaviour_logprob_T) * distance_T.square() / 2


def kl_distance(logprob_T: Tensor, behaviour_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """k3 = exp(d) − 1 − d, d = log π_ref − log π_θ, in nats, with the weight of `kl_loss`; not to be differentiated.

    Returns:
        float[T], ≥ 0.
    """
    d_T = reference_logprob_T - logprob_T
    return _weight(logprob_T, behaviour_logprob_T) * (d_T.exp() - 1 - d_T)


def _weight(logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
    return ratio(logprob_T, behaviour_logprob_T).clamp(0, _WEIGHT_LIMIT).detach()
