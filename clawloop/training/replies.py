"""Mean log-probability of whole replies under a model's present weights, without gradient."""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.contracts.training import BatchSample
from clawloop.errors import SampleUnusable
from clawloop.training.batch import plain_sequence
from clawloop.training.model.port import PolicyModel
from clawloop.training.packing.plan import check_limits
from clawloop.training.packing.sequences import Limits
from clawloop.training.progress import ProgressCallback
from clawloop.training.ranks.collectives import Ranks
from clawloop.training.scorer import Scorer
from clawloop.training.scoring_passes import ScoringPass, shard_batch


def score_replies(
    model: PolicyModel, samples: Sequence[BatchSample], limits: Limits, ranks: Ranks, on_progress: ProgressCallback
) -> dict[int, float]:
    """Index of the sample → mean log-probability of its reply's tokens in nats; the same on every rank.

    Samples that are malformed or beyond the limits are left out.
    """
    usable = {index: sample for index, sample in enumerate(samples) if _fits(sample, limits)}
    if not usable:
        return {}
    places = list(usable)
    shard = shard_batch(list(usable.values()), limits, (), rank=ranks.rank, world_size=ranks.world_size)
    scores, _ = Scorer(model, 0, None, ranks, on_progress).score(ScoringPass(version=0, made=True), shard.trained, {})
    means = {places[member]: float(of_reply.logprob_T.mean()) for member, of_reply in scores.items()}
    return {index: mean for of_rank in ranks.all_gather(means) for index, mean in of_rank.items()}


def _fits(sample: BatchSample, limits: Limits) -> bool:
    try:
        check_limits(plain_sequence(sample), limits)
    except SampleUnusable:
        return False
    return True
