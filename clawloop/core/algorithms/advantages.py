"""Advantages per token, from a sample's reward and from the teacher that read the hint (OpenClaw-RL, arXiv 2603.10165).

A term that is not known is left out, not taken as zero: a sample without a hint has no teacher, and the difference
between two models' log-probs must not stand in for one. Dimension suffix: `_T` response tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from clawloop.core.algorithms.streams import Streams
from clawloop.core.errors import StreamsUnusable
from clawloop.core.recipes.recipe import Advantage


def teacher_gap(
    teacher_logprob_T: Tensor, answered_logprob_T: Tensor, clip: float, centred_T: Tensor | None = None
) -> Tensor:
    """log π_T(a | s + hint) − log π_v(a | s), in nats, clipped to ±clip so that one token cannot dominate the step.

    Both are the trainer's. Against the recorded log μ, the difference between engine and trainer (rounding, a quantised
    base) would count as advice.

    Args:
        teacher_logprob_T: float[T], log-probs of the response's tokens under the teacher.
        answered_logprob_T: float[T], under the version that answered, without the hint (π_v).
        clip: bound in nats, > 0.
        centred_T: bool[T]; the mean gap of these tokens is subtracted before clipping. None: nothing is subtracted.

    Raises:
        StreamsUnusable: lengths disagree.
    """
    if teacher_logprob_T.shape != answered_logprob_T.shape:
        raise StreamsUnusable(
            f"{len(teacher_logprob_T)} teacher log-probs for {len(answered_logprob_T)} of the version that answered"
        )
    gap_T = teacher_logprob_T - answered_logprob_T
    if centred_T is not None:
        gap_T = gap_T - gap_T[centred_T].mean()
    return gap_T.clamp(-clip, clip)


def support_advantage(
    teacher_TK: Tensor, answered_TK: Tensor, within_TK: Tensor, clip: float, centred_T: Tensor | None = None
) -> Tensor:
    """A_k = w_k · clip(log π_T(k | s + hint) − log π_v(k | s)) of each id k of a support, w = π_v over the support.

    w is what the version that answered would choose among these ids, so that one it hardly ever produces says little
    (OpenClaw-RL, arXiv 2603.10165 v2).

    Args:
        teacher_TK: float[T, K], log-probs under the teacher.
        answered_TK: float[T, K], under the version that answered, without the hint (π_v).
        within_TK: bool[T, K]; False = not in the support. A position may have an empty support.
        clip: bound in nats, > 0.
        centred_T: bool[T]; the mean over these positions of Σ_k w_k·gap_k is subtracted from each gap before clipping.
            None: nothing is subtracted.

    Returns:
        float[T, K], 0 outside the support.
    """
    if not teacher_TK.shape == answered_TK.shape == within_TK.shape:
        raise StreamsUnusable(f"teacher {list(teacher_TK.shape)} for the answering version's {list(answered_TK.shape)}")
    weight_TK = answered_TK.masked_fill(~within_TK, float("-inf")).softmax(dim=-1)
    gap_TK = teacher_TK - answered_TK
    if centred_T is not None:
        gap_TK = gap_TK - torch.where(within_TK, weight_TK * gap_TK, 0.0).sum(dim=-1)[centred_T].mean()
    return torch.where(within_TK, weight_TK * gap_TK.clamp(-clip, clip), 0.0)


def downweight_unlikely(advantage_T: Tensor, behaviour_logprob_T: Tensor, share: float) -> Tensor:
    """Shrinks negative advantages by the token's probability: A < 0 becomes A·(1 − share·(1 − μ)), A ≥ 0 stays.

    The gradient of log π grows as the token gets less likely. Without this, one garbled answer with A < 0 on each token
    outweighs its whole batch, only to make less likely what hardly ever occurs (Z. Yang et al., "Do Not
    Let Low-Probability Tokens Over-Dominate in RL for LLMs", arXiv 2505.12929; its reweighting, for A < 0 only).

    Args:
        advantage_T: float[T].
        behaviour_logprob_T: float[T], log μ.
        share: the recipe's `spare_unlikely`; 0 changes nothing, 1 makes a negative advantage A·μ.
    """
    weight_T = 1 - share * (1 - behaviour_logprob_T.exp())
    return torch.where(advantage_T < 0, advantage_T * weight_T, advantage_T)


def with_advantage(streams: Streams, reward: float | None, weights: Advantage) -> Streams:
    """A copy of the streams with A = verdict_weight·r + teacher_weight·gap, from the terms that exist.

    Args:
        streams: with `teacher_logprob_T` and `answered_logprob_T` exactly when the sample has a hint.
        reward: the same for every token; None or 0 if there is no verdict to learn from.
        weights: the recipe's table `train.advantage`; a weight of 0 leaves its term out.

    Returns:
        A copy; its `advantage_T` is None when no term exists.

    Raises:
        StreamsUnusable: the reward is not finite; a teacher without the version that answered; or `spare_unlikely`
            without recorded log-probs.
    """
    if reward is not None and not math.isfinite(reward):
        raise StreamsUnusable(f"reward {reward} is not finite")
    advantage_T: Tensor | None = None
    if weights.teacher_weight and streams.teacher_logprob_T is not None:
        if streams.answered_logprob_T is None:
            raise StreamsUnusable("a teacher's gap needs the log-probs of the version that answered")
        centred_T = streams.response_mask_T if weights.centre_gap else None
        gap_T = teacher_gap(streams.teacher_logprob_T, streams.answered_logprob_T, weights.opd_clip, centred_T)
        advantage_T = weights.teacher_weight * gap_T
    if weights.verdict_weight and reward:
        like_T = streams.response_mask_T.float() if advantage_T is None else advantage_T
        broadcast_T = torch.full_like(like_T, weights.verdict_weight * reward)
        advantage_T = broadcast_T if advantage_T is None else advantage_T + broadcast_T
    if weights.spare_unlikely and advantage_T is not None:
        if streams.behaviour_logprob_T is None:
            raise StreamsUnusable("spare_unlikely needs the log-probs recorded when sampling")
        advantage_T = downweight_unlikely(advantage_T, streams.behaviour_logprob_T, weights.spare_unlikely)
    return replace(streams, advantage_T=advantage_T)
