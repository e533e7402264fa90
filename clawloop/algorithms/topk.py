"""Distillation over whole distributions: a KL divergence on K tokens and one bin for all others, per position.

Knows nothing about whose top-K it is: `student` (SDPO, SDFT: ids from the current student, the teacher
gathered at them) and `teacher` differ in the ids only.

The two directions differ where the student is sure of something else. The gradient of the reverse one on a logit
is p_S·(log p_S/p_T − KL): next to nothing where p_S is next to nothing, so what a student has stopped saying it does
not take up again. That of the forward one is p_S − p_T on each of the K ids: the teacher's word is taken up from
wherever the student stands, if it is among them, as with ids of the teacher's choice (R. Agarwal et al., "On-Policy
Distillation of Language Models", arXiv 2306.13649, compare them).
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
        topk_logprobs_TK: the student's log-probs at the ids, with gradient.
        tail_T: the student's log-probability of all other ids together, with gradient.
        teacher_topk_logprobs_TK: the teacher's log-probs at the same ids.
        teacher_tail_T: the teacher's log-probability of all other ids together.
        divergence: `reverse` is KL(S ‖ T), `forward` KL(T ‖ S).

    Returns:
        float[T], in nats, never negative: merging ids into a bin can only make a divergence smaller.

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
