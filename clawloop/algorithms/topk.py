"""Distillation over whole distributions: reverse KL on K tokens and one bin for all others, per position.

Knows nothing about whose top-K it is: `student` (SDPO, SDFT: ids from the current student, the teacher
gathered at them) and `teacher` differ in the ids only.
"""

from __future__ import annotations

from torch import Tensor

from clawloop.errors import StreamsUnusable


def reverse_kl_loss(
    topk_logprobs_TK: Tensor, tail_T: Tensor, teacher_topk_logprobs_TK: Tensor, teacher_tail_T: Tensor
) -> Tensor:
    """Σ_k p_S (log p_S − log p_T) over the K ids, plus the same of the tail.

    Args:
        topk_logprobs_TK: the student's log-probs at the ids, with gradient.
        tail_T: the student's log-probability of all other ids together, with gradient.
        teacher_topk_logprobs_TK: the teacher's log-probs at the same ids.
        teacher_tail_T: the teacher's log-probability of all other ids together.

    Returns:
        float[T], never negative: merging ids into a bin can only make the divergence smaller.

    Raises:
        StreamsUnusable: student and teacher have different shapes.
    """
    if topk_logprobs_TK.shape != teacher_topk_logprobs_TK.shape or tail_T.shape != teacher_tail_T.shape:
        raise StreamsUnusable(
            f"student top-K {list(topk_logprobs_TK.shape)} for teacher {list(teacher_topk_logprobs_TK.shape)}"
        )
    inside_T = (topk_logprobs_TK.exp() * (topk_logprobs_TK - teacher_topk_logprobs_TK)).sum(dim=-1)
    return inside_T + tail_T.exp() * (tail_T - teacher_tail_T)
