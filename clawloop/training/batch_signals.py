"""The streams of each sample before training: recorded log-probs, and the scores of policy, reference and teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clawloop.algorithms.advantages import with_advantage
from clawloop.algorithms.scoring import Scores
from clawloop.algorithms.staleness import has_drifted
from clawloop.algorithms.streams import Streams, logprobs_T
from clawloop.contracts.training import BatchSample
from clawloop.errors import NothingToTrain, StreamsUnusable
from clawloop.recipes.recipe import Train
from clawloop.training.scorer import Scorer
from clawloop.training.scoring_passes import RankShard, hinted_member


@dataclass(frozen=True, slots=True)
class BatchSignals:
    """Streams to train on of this rank's samples, by index in the batch, or the reasons that samples are dropped."""

    streams: dict[int, Streams]
    dropped: dict[int, str]


def gather_batch_signals(
    scorer: Scorer, samples: Sequence[BatchSample], shard: RankShard, recipe: Train
) -> BatchSignals:
    """Runs the passes without gradient and combines their scores with what was recorded.

    Raises:
        StepDiverged: a pass gives numbers that are not finite.
        AdapterUnusable, AdapterUnreadable: a teacher's version cannot be used, or not now.
    """
    policy: dict[int, Scores] = {}
    reference: dict[int, Scores] = {}
    teacher: dict[int, Scores] = {}
    answered: dict[int, Scores] = {}
    teacher_ids: dict[int, Tensor] = {}
    student_ids: dict[int, Tensor] = {}  # by member of the hinted document
    for scoring_pass, micro_batches in shard.scored.items():
        scores, ids = scorer.score(scoring_pass, micro_batches, at_ids=student_ids)
        if scoring_pass.policy:
            policy = scores
        if scoring_pass.reference:
            reference = scores
        if scoring_pass.hinted:
            teacher |= scores
            teacher_ids |= ids
        answered |= {index: scores[index] for index in scoring_pass.answered if index in scores}
        if scoring_pass.top_k and not scoring_pass.hinted:
            student_ids = {hinted_member(index): ids_TK for index, ids_TK in ids.items()}
    signals = BatchSignals({}, {})
    for index in (member for micro_batch in shard.trained for member in micro_batch.members):
        sample = samples[index]
        try:
            streams = _streams(
                sample,
                reference.get(index),
                teacher.get(hinted_member(index)),
                answered.get(index),
                teacher_ids.get(hinted_member(index)),
                scorer.model.device,
            )
            if recipe.loss.correction == "decoupled":
                streams = replace(streams, prox_logprob_T=policy[index].logprob_T)
            if recipe.loss.policy_gradient > 0:
                streams = with_advantage(streams, sample.reward, recipe.advantage)
        except (StreamsUnusable, NothingToTrain) as error:
            signals.dropped[index] = str(error)
            continue
        drift = _drift(policy[index], streams) if sample.explicit else 0.0
        if has_drifted(drift, bound=recipe.drift, explicit=sample.explicit):
            signals.dropped[index] = f"drifted: mean |log ratio| {drift:.2f}, bound {recipe.drift:g}"
        elif not _has_gradient(streams, recipe):
            signals.dropped[index] = "neither a verdict nor a hint that this recipe learns from"
        else:
            signals.streams[index] = streams
    return signals


def _streams(
    sample: BatchSample,
    reference: Scores | None,
    teacher: Scores | None,
    answered: Scores | None,
    topk_ids_TK: Tensor | None,
    device: torch.device,
) -> Streams:
    mask = sample.response_mask or [True] * len(sample.response_ids)
    streams = Streams(
        response_mask_T=torch.tensor(mask, dtype=torch.bool),
        behaviour_logprob_T=logprobs_T(sample.logprobs, name="behaviour_logprob_T"),
    ).to(device)
    return replace(
        streams,
        reference_logprob_T=reference.logprob_T if reference else None,
        teacher_logprob_T=teacher.logprob_T if teacher else None,
        answered_logprob_T=answered.logprob_T if answered else None,
        teacher_topk_ids_TK=topk_ids_TK if teacher else None,
        teacher_topk_logprobs_TK=teacher.topk_logprobs_TK if teacher else None,
        teacher_tail_T=teacher.tail_T if teacher else None,
    )


def _drift(policy: Scores, streams: Streams) -> float:
    """Mean |log ρ| over the trained tokens, in nats."""
    assert streams.behaviour_logprob_T is not None
    gap_T = (policy.logprob_T - streams.behaviour_logprob_T).abs()
    return float(gap_T[streams.response_mask_T].mean())


def _has_gradient(streams: Streams, recipe: Train) -> bool:
    return streams.advantage_T is not None or (recipe.loss.distillation > 0 and streams.teacher_topk_ids_TK is not None)
