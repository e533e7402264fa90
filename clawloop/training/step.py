"""One step: a batch of samples in, one optimiser update (per epoch) and its figures out.

Knows nothing about files, the ledger or Temporal. Everything that could stop the step (a number that is not
finite, a ratio or a distance to the base out of bounds) is looked at before the optimiser moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from clawloop.algorithms.aggregation import Divisor
from clawloop.algorithms.losses import StepLoss, step_loss
from clawloop.algorithms.metrics import SampleMetrics
from clawloop.algorithms.scoring import Scores
from clawloop.algorithms.streams import Streams
from clawloop.errors import NothingToTrain, StepDiverged
from clawloop.recipes.recipe import Optimiser, Train
from clawloop.training.batch import TrainingSample
from clawloop.training.batch_signals import (
    BatchSignals,
    Progress,
    ReadVersion,
    Report,
    Scorer,
    gather_batch_signals,
    ids_at_positions,
    scores_by_sample,
)
from clawloop.training.model.decoder import PolicyModel, TokenScores
from clawloop.training.model.loading import whole
from clawloop.training.packing.collate import Limits, Packed
from clawloop.training.packing.scoring_passes import RankShard, passes_before, shard_batch
from clawloop.training.ranks.ranks import Ranks

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did; the same on every rank.

    Args:
        loss, parts: of the last epoch; `parts` are weighted shares that add up to `loss`.
        grad_norm: before clipping, of the last epoch.
        ratio: mean π_θ/μ over the batch's trained tokens, before the first update.
        kl: mean distance to the base in nats, as k3 estimates it, likewise; None if the recipe has no KL part.
        tokens: trained tokens.
        samples: key → figures before the first update, of samples that were trained.
        dropped: key → why a sample was left out.
        micro_batches, fillers: forwards of all ranks in one epoch, and those of them without a sample.
    """

    loss: float
    parts: dict[str, float]
    grad_norm: float
    ratio: float
    kl: float | None
    tokens: int
    samples: dict[str, SampleMetrics]
    dropped: dict[str, str]
    micro_batches: int
    fillers: int


def make_optimizer(model: PolicyModel, settings: Optimiser) -> torch.optim.AdamW:
    """AdamW over the adapter. Its history is set by `checkpoint.begin` or `checkpoint.resume`."""
    return torch.optim.AdamW(
        list(model.adapter_parameters().values()),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )


def train_step(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[TrainingSample],
    recipe: Train,
    limits: Limits,
    *,
    parent: int = 0,
    read_version: ReadVersion | None = None,
    ranks: Ranks | None = None,
    report: Report | None = None,
) -> StepReport:
    """Train on one batch.

    Args:
        model, optimizer: as `checkpoint.begin` or `checkpoint.resume` set them.
        samples: the whole batch, the same and in the same order on every rank.
        recipe: weights, bounds, epochs.
        limits: what fits into a micro-batch.
        parent: the version the model is.
        read_version: how to get an earlier version's adapter; needed when one answered and its hint teaches.
        ranks: who takes part; this process alone if None.
        report: called after each micro-batch, on every rank.

    Raises:
        SampleUnusable: a sample is too long or malformed; nothing was computed.
        StepDiverged: something is not finite, or over `recipe.bounds`. After the first epoch the model in
            memory has moved, so go on from the last committed version.
        NothingToTrain: no sample is left to learn from.
        AdapterUnusable: a teacher's version cannot be had.
    """
    ranks = ranks or Ranks()
    report = report or _say_nothing
    share = shard_batch(samples, limits, passes_before(samples, recipe, parent), rank=ranks.rank, world=ranks.world)
    evidence = gather_batch_signals(Scorer(model, parent, read_version, ranks, report), samples, share, recipe)
    dropped = _merged(ranks.gather(evidence.dropped))
    divisor = sum(ranks.gather(Divisor.of(evidence.streams.values())), start=Divisor(0, 0))
    if divisor.samples == 0:
        raise NothingToTrain(f"no sample of {len(samples)} is left: {'; '.join(sorted(set(dropped.values())))}")
    epochs: list[_Epoch] = []
    for _ in range(recipe.optimiser.epochs):
        optimizer.zero_grad(set_to_none=True)
        epoch = _accumulate(model, share, evidence, recipe, divisor, ranks, report)
        norm = clip_grad_norm_(model.adapter_parameters().values(), recipe.optimiser.grad_clip)
        epochs.append(replace(epoch, grad_norm=float(whole(norm))))
        _check(epochs[-1], recipe)
        optimizer.step()
    first, last = epochs[0], epochs[-1]
    packs = ranks.gather([pack.is_filler for pack in share.packs])
    return StepReport(
        loss=last.loss,
        parts=last.parts,
        grad_norm=last.grad_norm,
        ratio=first.ratio,
        kl=first.kl,
        tokens=divisor.tokens,
        samples={samples[index].key: first.metrics[index] for index in sorted(first.metrics)},
        dropped={samples[index].key: dropped[index] for index in sorted(dropped)},
        micro_batches=sum(len(of_rank) for of_rank in packs),
        fillers=sum(sum(of_rank) for of_rank in packs),
    )


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One pass with gradient over the whole batch, all ranks together."""

    loss: float
    parts: dict[str, float]
    metrics: dict[int, SampleMetrics]
    grad_norm: float = math.nan  # known once all of the gradient is there

    @property
    def ratio(self) -> float:
        mean = _token_mean((m.tokens, m.ratio_mean) for m in self.metrics.values())
        assert mean is not None  # log-probs recorded when sampling are never missing
        return mean

    @property
    def kl(self) -> float | None:
        return _token_mean((m.tokens, m.kl) for m in self.metrics.values())


def _accumulate(
    model: PolicyModel,
    share: RankShard,
    evidence: BatchSignals,
    recipe: Train,
    divisor: Divisor,
    ranks: Ranks,
    report: Report,
) -> _Epoch:
    """Leave the batch's gradient on the adapter."""
    results: list[StepLoss] = []
    metrics: dict[int, SampleMetrics] = {}
    for done, pack in enumerate(share.packs, start=1):
        on_device = pack.to(model.device)
        kept = [member for member in pack.members if member in evidence.streams]
        reading: TokenScores = model(
            on_device, entropies=recipe.loss.entropy > 0, at_ids_NK=_compared_ids(on_device, evidence.streams)
        )
        # A pack without a sample to learn from still takes part in FSDP's backward pass.
        objective = reading.logprobs_N.sum() * 0
        with ranks.raise_on_all_ranks():
            if kept:
                scores = scores_by_sample(on_device, reading)
                pairs = [(_comparable(scores[m], evidence.streams[m]), evidence.streams[m]) for m in kept]
                result = step_loss(pairs, recipe, divisor)
                objective = result.loss
                results.append(result)
                metrics |= dict(zip(kept, result.metrics, strict=True))
        # FSDP averages gradients over ranks; the divisor already counts all of them.
        (objective * ranks.world).backward()  # type: ignore[no-untyped-call]
        report(Progress("train", done, len(share.packs)))
    parts: dict[str, float] = {}
    for of_rank in ranks.gather([result.parts for result in results]):
        for of_pack in of_rank:
            for part, value in of_pack.items():
                parts[part] = parts.get(part, 0.0) + value
    return _Epoch(sum(parts.values()), parts, _merged(ranks.gather(metrics)))


def _compared_ids(packed: Packed, streams: Mapping[int, Streams]) -> Tensor | None:
    """The ids at which a teacher was read, for each position; positions without one get any ids."""
    known = {m: s.teacher_topk_ids_TK for m in packed.members if (s := streams.get(m)) is not None}
    return ids_at_positions(packed, {member: ids_TK for member, ids_TK in known.items() if ids_TK is not None})


def _comparable(scores: Scores, streams: Streams) -> Scores:
    if streams.teacher_topk_ids_TK is not None:
        return scores
    return replace(scores, topk_logprobs_TK=None, tail_T=None)


def _check(epoch: _Epoch, recipe: Train) -> None:
    if not (math.isfinite(epoch.loss) and math.isfinite(epoch.grad_norm)):
        raise StepDiverged(f"loss {epoch.loss}, gradient norm {epoch.grad_norm}")
    if not epoch.ratio <= recipe.bounds.ratio:
        raise StepDiverged(f"mean ratio {epoch.ratio:.3g}, bound {recipe.bounds.ratio:g}")
    if epoch.kl is not None and not epoch.kl <= recipe.bounds.kl:
        raise StepDiverged(f"mean KL to the base {epoch.kl:.3g}, bound {recipe.bounds.kl:g}")


def _token_mean(pairs: Iterable[tuple[int, float | None]]) -> float | None:
    known = [(tokens, value) for tokens, value in pairs if value is not None]
    tokens = sum(count for count, _ in known)
    return sum(count * value for count, value in known) / tokens if tokens else None


def _merged(parts: Iterable[Mapping[int, Value]]) -> dict[int, Value]:
    return {index: value for part in parts for index, value in part.items()}


def _say_nothing(progress: Progress) -> None:
    del progress
