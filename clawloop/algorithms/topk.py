"""Distillation over whole distributions: a KL divergence on K token ids and one bin for all others, per position.

Recipes with `top_k_of = "student"` (the SDFT/SDPO family) take the student's K most likely ids, those with `"teacher"`
the teacher's; the divergence is the same.

The two directions differ where the student is sure of another token. The gradient of the reverse KL on a logit is
p_S·(log p_S/p_T − KL): almost 0 where p_S is almost 0, so a token the student no longer produces is not relearned. That
of the forward KL is p_S − p_T on each of the K ids: a token of the teacher's is learned whatever its p_S, if it is
among the K ids, as with `top_k_of = "teacher"` (R. Agarwal et al., "On-Policy Distillation of Language Models",
arXiv 2306.13649, compare the two).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from clawloop.errors import StreamsUnusable

Divergence: TypeAlias = Literal["reverse", "forward"]


def kl_over_top_k(
    topk_logprobs_TK: Tensor,
    tail_T: Tensor,
    teacher_topk_logprobs_TK: Tensor,
    teacher_tail_T: Tensor,
    divergence: Divergence = "reverse",
) -> Tensor:
    """Σ_k p_S (log p_S − log p_T) over the K ids, plus the same of the tail; `forward`: Σ_k p_T (log p_T − log p_S).

    Args:
        topk_logprobs_TK: float[T, K], the student's log-probs at the ids, with gradient.
        tail_T: float[T], the student's log-probability of all other ids together, with gradient.
        teacher_topk_logprobs_TK: float[T, K], the teacher's log-probs at the same ids.
        teacher_tail_T: float[T], the teacher's log-probability of all other ids together.
        divergence: `reverse` is KL(S ‖ T), `forward` KL(T ‖ S).

    Returns:
        float[T], in nats, ≥ 0 and at most the KL over the whole vocabulary: merging ids into a bin never increases it.

    Raises:
        StreamsUnusable: student and teacher have different shapes.
    """
    if topk_logprobs_TK.shape != teacher_topk_logprobs_TK.shape or tail_T.shape != teacher_tail_T.shape:
        raise StreamsUnusable(
            f"student top-K {list(topk_logprobs_TK.shape)} for teacher {list(teacher_topk_logprobs_TK.shape)}"
        )
    of_ids_TK = topk_logprobs_TK - teacher_topk_logprobs_TK
    of_tail_T = tail_T - teacher_tail_T
    if divergence == "forward":
        return -(teacher_topk_logprobs_TK.exp() * of_ids_TK).sum(dim=-1) - teacher_tail_T.exp() * of_tail_T
    return (topk_logprobs_TK.exp() * of_ids_TK).sum(dim=-1) + tail_T.exp() * of_tail_T
