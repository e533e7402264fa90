"""The loss of a step: weighted parts, each of which runs where its streams exist.

Knows nothing about methods, models, micro-batches or ranks. Binary RL, distillation from hints, the combined
method, groups and top-K differ in the streams a sample has and in the weights of a plan, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from clawloop.algorithms.aggregation import Aggregation, Divisor, aggregate
from clawloop.algorithms.kl import kl_loss
from clawloop.algorithms.metrics import SampleMetrics, sample_metrics
from clawloop.algorithms.policy_gradient import Clip, policy_gradient_loss
from clawloop.algorithms.scoring import Scores
from clawloop.algorithms.streams import Streams
from clawloop.algorithms.topk import Divergence, kl_over_top_k
from clawloop.errors import NothingToTrain, StepDiverged, StreamsUnusable

Part: TypeAlias = Literal["policy_gradient", "distillation", "kl", "entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """What a recipe says about the loss; its `train.loss` table, and `divergence` in `train.distillation`, have the
    same names and defaults.

    Args:
        policy_gradient, distillation, kl, entropy: weights of the parts; 0 leaves a part out. `entropy` is a
            bonus: it is subtracted.
        clip_low, clip_high, dual_clip: see `Clip`.
        correction: `decoupled` needs `prox_logprob_T`, and is for several epochs over one batch.
        aggregation: what counts the same, tokens or samples.
        divergence: of the distillation, see `kl_over_top_k`.
    """

    policy_gradient: float = 1.0
    distillation: float = 0.0
    kl: float = 0.02
    entropy: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    correction: Literal["none", "decoupled"] = "none"
    aggregation: Aggregation = "token"
    divergence: Divergence = "reverse"

    @property
    def clip(self) -> Clip:
        return Clip(self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True, slots=True, eq=False)
class StepLoss:
    """The loss of one micro-batch.

    Args:
        loss: scalar with gradient; losses of a step's micro-batches add up.
        parts: each part's weighted share of `loss`; a part that ran nowhere is absent.
        metrics: of each sample, in the order given.
    """

    loss: Tensor
    parts: dict[Part, float]
    metrics: tuple[SampleMetrics, ...]


def step_loss(batch: Sequence[tuple[Scores, Streams]], plan: LossPlan, divisor: Divisor) -> StepLoss:
    """The loss of some samples of a step.

    Args:
        batch: per sample, what the student says of the response's tokens, and the sample's streams.
        plan: the parts and their weights.
        divisor: counted over the whole step, one for all parts: the gradient of a sample must not depend on
            the streams its neighbours have.

    Raises:
        NothingToTrain: an empty batch, or a sample with neither an advantage nor a teacher's distribution to
            learn from; such a sample would dilute the others.
        StreamsUnusable: scores and streams disagree, or a part lacks what it cannot run without.
        StepDiverged: the loss is not finite.
    """
    if not batch or len(batch) > divisor.samples:
        raise NothingToTrain(f"{len(batch)} samples of a step that counts {divisor.samples}")
    shares: dict[Part, list[Tensor]] = {}
    metrics: list[SampleMetrics] = []
    for index, (scores, streams) in enumerate(batch):
        trained_scores, trained = scores.at(streams.response_mask_T), streams.trained()
        metrics.append(sample_metrics(trained_scores, trained, plan.clip))
        for part, loss_N in _parts(trained_scores, trained, plan).items():
            share = aggregate(loss_N, divisor, plan.aggregation)
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


def _parts(scores: Scores, streams: Streams, plan: LossPlan) -> dict[Part, Tensor]:
    """The weighted losses of one sample's trained tokens, per part that runs."""
    parts: dict[Part, Tensor] = {}
    if plan.policy_gradient and streams.advantage_T is not None:
        if plan.correction == "decoupled" and streams.prox_logprob_T is None:
            raise StreamsUnusable("the decoupled correction needs prox_logprob_T")
        parts["policy_gradient"] = plan.policy_gradient * policy_gradient_loss(
            scores.logprob_T,
            _behaviour(streams),
            streams.advantage_T,
            plan.clip,
            prox_logprob_T=streams.prox_logprob_T if plan.correction == "decoupled" else None,
        )
    if plan.distillation and streams.teacher_topk_logprobs_TK is not None:
        if scores.topk_logprobs_TK is None or scores.tail_T is None or streams.teacher_tail_T is None:
            raise StreamsUnusable("distillation needs the student's log-probs at the teacher's ids")
        parts["distillation"] = plan.distillation * kl_over_top_k(
            scores.topk_logprobs_TK,
            scores.tail_T,
            streams.teacher_topk_logprobs_TK,
            streams.teacher_tail_T,
            plan.divergence,
        )
    if not parts:
        raise NothingToTrain("a sample with neither an advantage nor a teacher's distribution")
    if plan.kl and streams.reference_logprob_T is not None:
        parts["kl"] = plan.kl * kl_loss(scores.logprob_T, _behaviour(streams), streams.reference_logprob_T)
    if plan.entropy:
        if scores.entropy_T is None:
            raise StreamsUnusable("an entropy bonus needs the student's entropy")
        parts["entropy"] = -plan.entropy * scores.entropy_T
    return parts


def _behaviour(streams: Streams) -> Tensor:
    if streams.behaviour_logprob_T is None:
        raise StreamsUnusable("without the log-probs recorded when sampling there is no ratio")
    return streams.behaviour_logprob_T
