"""Advantages of tokens, from a sample's reward and from what a teacher with the hint would have said.

Knows nothing about recipes or models. A term that is not there is left out, not taken as zero: a sample
without a hint has no teacher, and the difference between two models' log-probs must not stand in for one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from clawloop.algorithms.streams import Streams
from clawloop.errors import StreamsUnusable


def teacher_gap(teacher_logprob_T: Tensor, behaviour_logprob_T: Tensor, clip: float) -> Tensor:
    """log π_T(a | s + hint) − log μ(a | s), cut to ±clip: one surprised token must not rule the step.

    Raises:
        StreamsUnusable: lengths disagree.
    """
    if teacher_logprob_T.shape != behaviour_logprob_T.shape:
        raise StreamsUnusable(
            f"{len(teacher_logprob_T)} teacher log-probs for {len(behaviour_logprob_T)} recorded ones"
        )
    return (teacher_logprob_T - behaviour_logprob_T).clamp(-clip, clip)


def spared(advantage_T: Tensor, behaviour_logprob_T: Tensor, share: float) -> Tensor:
    """Blame by how likely a token was: A < 0 becomes A·(1 − share·(1 − μ)), praise stays as it is.

    ∇ log π of a token is the longer the less likely it was: without this, one garbled answer that is blamed token by
    token outweighs its whole batch, only to make less likely what hardly ever comes (Z. Yang et al., "Do Not Let
    Low-Probability Tokens Over-Dominate in RL for LLMs", arXiv 2505.12929, whose reweighting this follows for blame).

    Args:
        share: 0 changes nothing; 1 makes the blame of a token A·μ.
    """
    weight_T = 1 - share * (1 - behaviour_logprob_T.exp())
    return torch.where(advantage_T < 0, advantage_T * weight_T, advantage_T)


def with_advantage(
    streams: Streams,
    reward: float | None,
    *,
    verdict_weight: float = 1.0,
    teacher_weight: float = 1.0,
    gap_clip: float = 2.0,
    spare_unlikely: float = 0.0,
) -> Streams:
    """The streams with their advantage: verdict_weight·r + teacher_weight·gap, of the terms that exist.

    Args:
        streams: with `teacher_logprob_T` exactly when the sample has a hint.
        reward: the same for every token; None or 0 if there is no verdict to learn from.
        verdict_weight, teacher_weight: 0 leaves a term out.
        gap_clip: see `teacher_gap`.
        spare_unlikely: the share of `spared`.

    Returns:
        A copy; its `advantage_T` is None when no term exists.

    Raises:
        StreamsUnusable: the reward is not finite, or a teacher, or sparing, without recorded log-probs.
    """
    if reward is not None and not math.isfinite(reward):
        raise StreamsUnusable(f"reward {reward} is not finite")
    advantage_T: Tensor | None = None
    if teacher_weight and streams.teacher_logprob_T is not None:
        if streams.behaviour_logprob_T is None:
            raise StreamsUnusable("a teacher's gap needs the log-probs recorded when sampling")
        gap_T = teacher_gap(streams.teacher_logprob_T, streams.behaviour_logprob_T, gap_clip)
        advantage_T = teacher_weight * gap_T
    if verdict_weight and reward:
        like_T = streams.response_mask_T.float() if advantage_T is None else advantage_T
        broadcast_T = torch.full_like(like_T, verdict_weight * reward)
        advantage_T = broadcast_T if advantage_T is None else advantage_T + broadcast_T
    if spare_unlikely and advantage_T is not None:
        if streams.behaviour_logprob_T is None:
            raise StreamsUnusable("sparing unlikely tokens needs the log-probs recorded when sampling")
        advantage_T = spared(advantage_T, streams.behaviour_logprob_T, spare_unlikely)
    return replace(streams, advantage_T=advantage_T)
