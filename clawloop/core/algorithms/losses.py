"""The loss of a step: weighted parts per token, aggregated, with the figures that are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from clawloop.core.algorithms.scoring import Scores
from clawloop.core.algorithms.streams import Streams
from clawloop.core.contracts.training import SampleMetrics
from clawloop.core.errors import NothingToTrain, StepDiverged, StreamsUnusable
from clawloop.core.recipes.recipe import Bounds, Distillation, Train

# Aggregation ----------------------------------------------------------------------------------------------------------
# Token losses aggregated to a step's loss.
#
# Every sum is divided by a count over the whole step, which the caller passes in, so that any split of a step into
# micro-batches and ranks adds up to the same gradient.

Aggregation: TypeAlias = Literal["token", "sequence"]
"""`token`: every trained token has the same weight. `sequence`: every sequence has the same weight: a sample of a chat,
or all samples of an episode together."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """Trained tokens and samples of a whole step, over all its micro-batches and ranks.

    Args:
        tokens: trained tokens.
        samples: samples with at least one trained token.
        sequences: number of sequences among the samples; None if each sample is one.
    """

    tokens: int
    samples: int
    sequences: int | None = None

    @classmethod
    def of(cls, batch: Iterable[Streams]) -> Divisor:
        """Counts one part of a step. Parts are added with `+`, also across ranks."""
        counts = [streams.trained_tokens for streams in batch]
        return cls(tokens=sum(counts), samples=len(counts))

    def __add__(self, other: Divisor) -> Divisor:
        return Divisor(self.tokens + other.tokens, self.samples + other.samples)


def aggregate(loss_N: Tensor, divisor: Divisor, aggregation: Aggregation, sequence_tokens: int | None = None) -> Tensor:
    """One sample's share of the step's loss, a scalar.

    Args:
        loss_N: float[N], losses of the sample's trained tokens only.
        divisor: of the whole step. If gradients are averaged over ranks, multiply the sum by the number of ranks.
        aggregation: whether tokens or sequences have the same weight.
        sequence_tokens: trained tokens of the sample's whole sequence; None if the sample is one by itself.

    Raises:
        NothingToTrain: no token, or a divisor of zero.
    """
    if loss_N.numel() == 0 or divisor.tokens < loss_N.numel() or divisor.samples < 1:
        raise NothingToTrain(f"{loss_N.numel()} tokens of a step that counts {divisor.tokens}")
    if aggregation == "token":
        return loss_N.sum() / divisor.tokens
    return loss_N.sum() / (sequence_tokens or loss_N.numel()) / (divisor.sequences or divisor.samples)


# Distance to the base model -------------------------------------------------------------------------------------------
# Distance to the base model per token: k3 as the reported figure, k2 as the loss that keeps it small.
#
# Both estimate KL(π_θ ‖ π_ref) from tokens drawn from π_θ; here tokens were drawn from μ, hence the weight. k3 is an
# unbiased estimate and never negative, but its gradient is that of KL(π_ref ‖ π_θ), weighted π_ref/π_θ: one token of a
# style that was unlearned outweighs a whole batch. The gradient of k2, log(π_θ/π_ref)·∇log π_θ, is that of the
# distance itself, and such a token's weight grows with the logarithm only (J. Schulman, "Approximating KL divergence",
# defines k1, k2 and k3; DeepSeek-V3.2, section 3.1, has the same gradient).

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


# Policy gradient ------------------------------------------------------------------------------------------------------
# The clipped policy-gradient objective per token: PPO (arXiv 1707.06347) with clip-higher and dual clip.
#
# The ratio is taken against the log-probs recorded when the token was sampled, so it corrects for staleness and for
# the difference between engine and trainer. The denominator is never recomputed from the weights being trained, which
# would fix the ratio at one. Dimension suffix: `_T` response tokens.

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


# Distillation over distributions --------------------------------------------------------------------------------------
# Distillation over whole distributions: a KL divergence on K token ids and one bin for all others, per position.
#
# Recipes with `top_k_of = "student"` (the SDFT/SDPO family) take the K most likely ids of the version that answered,
# those with `"teacher"` the teacher's; the divergence is the same. With `divergence = "clipped"` there is none, but the
# policy gradient over these ids (OpenClaw-RL, arXiv 2603.10165 v2).
#
# The two directions differ where the student is sure of another token. The gradient of the reverse KL on a logit is
# p_S·(log p_S/p_T − KL): almost 0 where p_S is almost 0, so a token the student no longer produces is not relearned.
# That of the forward KL is p_S − p_T on each of the K ids: a token of the teacher's is learned whatever its p_S, if it
# is among the K ids, as with `top_k_of = "teacher"` (R. Agarwal et al., "On-Policy Distillation of Language Models",
# arXiv 2306.13649, compare the two).

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


def support_loss(logprob_TK: Tensor, answered_TK: Tensor, advantage_TK: Tensor, clip: Clip) -> Tensor:
    """Minus the clipped objective of each id of a support, summed over the support, float[T].

    Args:
        logprob_TK: float[T, K], the student's log-probs of the ids, with gradient.
        answered_TK: float[T, K], under the version that answered; each id has the ratio π_θ/π_v.
        advantage_TK: float[T, K], see `advantages.support_advantage`.
    """
    if not logprob_TK.shape == answered_TK.shape == advantage_TK.shape:
        raise StreamsUnusable(f"student top-K {list(logprob_TK.shape)} for advantages {list(advantage_TK.shape)}")
    return -clipped_objective(ratio(logprob_TK, answered_TK), advantage_TK, clip).sum(dim=-1)


# Figures --------------------------------------------------------------------------------------------------------------
# Figures of one sample in one forward pass, as plain numbers; None where a figure is not known for the sample.


@torch.no_grad()
def sample_metrics(scores: Scores, streams: Streams, clip: Clip, bounds: Bounds) -> SampleMetrics:
    """The metrics of one sample; `scores` and `streams` hold its trained tokens only."""
    found: dict[str, torch.Tensor] = {}
    if streams.behaviour_logprob_T is not None:
        ratio_N = ratio(scores.logprob_T, streams.behaviour_logprob_T)
        found["ratio_mean"], found["ratio_max"] = ratio_N.mean(), ratio_N.max()
        found["bounded_ratio"] = ratio_N.clamp(max=2 * bounds.ratio).mean()
        found["mean_abs_log_ratio"] = (scores.logprob_T - streams.behaviour_logprob_T).abs().mean()
        if streams.advantage_T is not None:
            base_N = ratio_N if streams.prox_logprob_T is None else ratio(scores.logprob_T, streams.prox_logprob_T)
            found["clip_share"] = is_clipped(base_N, streams.advantage_T, clip).double().mean()
    if streams.reference_logprob_T is not None and streams.behaviour_logprob_T is not None:
        kl_N = kl_distance(scores.logprob_T, streams.behaviour_logprob_T, streams.reference_logprob_T)
        found["kl"], found["bounded_kl"] = kl_N.mean(), kl_N.clamp(max=2 * bounds.kl).mean()
    if scores.entropy_T is not None:
        found["entropy"] = scores.entropy_T.mean()
    # One transfer from the device for all figures.
    numbers = torch.stack([value.double() for value in found.values()]).tolist() if found else []
    known: dict[str, float] = dict(zip(found, numbers, strict=True))
    return SampleMetrics(
        tokens=len(streams),
        ratio_mean=known.get("ratio_mean"),
        ratio_max=known.get("ratio_max"),
        mean_abs_log_ratio=known.get("mean_abs_log_ratio"),
        clip_share=known.get("clip_share"),
        kl=known.get("kl"),
        entropy=known.get("entropy"),
        bounded_ratio=known.get("bounded_ratio"),
        bounded_kl=known.get("bounded_kl"),
    )


# The loss -------------------------------------------------------------------------------------------------------------
# The loss of a step: a weighted sum of parts; a part runs for the samples that have its streams.
#
# Binary RL, distillation from hints, the combined method, groups and top-K differ only in the streams a sample has and
# in the recipe's weights.

Part: TypeAlias = Literal["policy_gradient", "distillation", "kl", "entropy"]


@dataclass(frozen=True, slots=True, eq=False)
class StepLoss:
    """The loss of one micro-batch.

    Args:
        loss: scalar with gradient; the losses of a step's micro-batches are summed.
        parts: each part's weighted share of `loss`; a part that ran for no sample is absent.
        metrics: one per sample, in the order given.
    """

    loss: Tensor
    parts: dict[Part, float]
    metrics: tuple[SampleMetrics, ...]


def step_loss(
    batch: Sequence[tuple[Scores, Streams]],
    recipe: Train,
    divisor: Divisor,
    sequence_tokens: Sequence[int] | None = None,
) -> StepLoss:
    """The loss of some samples of a step.

    Args:
        batch: per sample, the student's scores of the response's tokens, and the sample's streams.
        recipe: `loss` has the weights of the parts (0 leaves a part out; the entropy bonus is subtracted), the clip
            and the aggregation, `distillation` the direction of the divergence.
        divisor: counted over the whole step, the same for all parts: the gradient of a sample must not depend on
            which streams other samples have.
        sequence_tokens: per sample, the trained tokens of its whole sequence in the step, an episode's or its own;
            None: each sample is a sequence.

    Raises:
        NothingToTrain: an empty batch, or a sample with neither an advantage nor a teacher's distribution: it would
            dilute the others.
        StreamsUnusable: scores and streams disagree, or a part lacks what it cannot run without.
        StepDiverged: the loss is not finite.
    """
    if not batch or len(batch) > divisor.samples:
        raise NothingToTrain(f"{len(batch)} samples of a step that counts {divisor.samples}")
    loss = recipe.loss
    clip = Clip(loss.clip_low, loss.clip_high, loss.dual_clip)
    shares: dict[Part, list[Tensor]] = {}
    metrics: list[SampleMetrics] = []
    for index, (scores, streams) in enumerate(batch):
        trained_scores, trained = scores.at(streams.response_mask_T), streams.trained()
        metrics.append(sample_metrics(trained_scores, trained, clip, recipe.bounds))
        for part, loss_N in _parts(trained_scores, trained, recipe, clip).items():
            of_sequence = None if sequence_tokens is None else sequence_tokens[index]
            share = aggregate(loss_N, divisor, loss.aggregation, of_sequence)
            if not bool(share.isfinite()):
                raise StepDiverged(f"the {part} loss of sample {index} is not finite")
            shares.setdefault(part, []).append(share)
    totals = {part: sum(values[1:], start=values[0]) for part, values in shares.items()}
    values = list(totals.values())
    return StepLoss(
        loss=sum(values[1:], start=values[0]),
        parts={part: float(total.detach()) for part, total in totals.items()},
        metrics=tuple(metrics),
    )


def _parts(scores: Scores, streams: Streams, recipe: Train, clip: Clip) -> dict[Part, Tensor]:
    """The weighted losses of one sample's N trained tokens, float[N] per part that runs."""
    loss = recipe.loss
    parts: dict[Part, Tensor] = {}
    if loss.policy_gradient and streams.advantage_T is not None:
        if loss.correction == "decoupled" and streams.prox_logprob_T is None:
            raise StreamsUnusable("the decoupled correction needs prox_logprob_T")
        parts["policy_gradient"] = loss.policy_gradient * policy_gradient_loss(
            scores.logprob_T,
            _behaviour(streams),
            streams.advantage_T,
            clip,
            prox_logprob_T=streams.prox_logprob_T if loss.correction == "decoupled" else None,
        )
    if loss.distillation and streams.teacher_topk_logprobs_TK is not None:
        if scores.topk_logprobs_TK is None or scores.tail_T is None or streams.teacher_tail_T is None:
            raise StreamsUnusable("distillation needs the student's log-probs at the teacher's ids")
        parts["distillation"] = loss.distillation * _distillation(
            scores.topk_logprobs_TK, scores.tail_T, streams, recipe.distillation, clip
        )
    if not parts:
        raise NothingToTrain("a sample with neither an advantage nor a teacher's distribution")
    if loss.kl and streams.reference_logprob_T is not None:
        parts["kl"] = loss.kl * kl_loss(scores.logprob_T, _behaviour(streams), streams.reference_logprob_T)
    if loss.entropy:
        if scores.entropy_T is None:
            raise StreamsUnusable("an entropy bonus needs the student's entropy")
        parts["entropy"] = -loss.entropy * scores.entropy_T
    return parts


def _distillation(
    logprob_TK: Tensor, tail_T: Tensor, streams: Streams, distillation: Distillation, clip: Clip
) -> Tensor:
    if distillation.divergence == "clipped":
        if streams.answered_topk_logprobs_TK is None or streams.topk_advantage_TK is None:
            raise StreamsUnusable("the clipped divergence needs the ids' advantages and the version that answered")
        return support_loss(logprob_TK, streams.answered_topk_logprobs_TK, streams.topk_advantage_TK, clip)
    assert streams.teacher_topk_logprobs_TK is not None
    assert streams.teacher_tail_T is not None
    return kl_over_top_k(
        logprob_TK, tail_T, streams.teacher_topk_logprobs_TK, streams.teacher_tail_T, distillation.divergence
    )


def _behaviour(streams: Streams) -> Tensor:
    if streams.behaviour_logprob_T is None:
        raise StreamsUnusable("without the log-probs recorded when sampling there is no ratio")
    return streams.behaviour_logprob_T
