"""The loss of a step: a weighted sum of parts; a part runs for the samples that have its streams.

Binary RL, distillation from hints, the combined method, groups and top-K differ only in the streams a sample has and
in the recipe's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from clawloop.algorithms.aggregation import Divisor, aggregate
from clawloop.algorithms.kl import kl_loss
from clawloop.algorithms.metrics import sample_metrics
from clawloop.algorithms.policy_gradient import Clip, policy_gradient_loss
from clawloop.algorithms.scoring import Scores
from clawloop.algorithms.streams import Streams
from clawloop.algorithms.topk import kl_over_top_k
from clawloop.contracts.training import SampleMetrics
from clawloop.errors import NothingToTrain, StepDiverged, StreamsUnusable
from clawloop.recipes.recipe import Train

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
        parts["distillation"] = loss.distillation * kl_over_top_k(
            scores.topk_logprobs_TK,
            scores.tail_T,
            streams.teacher_topk_logprobs_TK,
            streams.teacher_tail_T,
            recipe.distillation.divergence,
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


def _behaviour(streams: Streams) -> Tensor:
    if streams.behaviour_logprob_T is None:
        raise StreamsUnusable("without the log-probs recorded when sampling there is no ratio")
    return streams.behaviour_logprob_T
