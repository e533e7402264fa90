"""One training step: a batch of samples in, one optimiser update per epoch and the step's figures out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from clawloop.core.algorithms.advantages import support_advantage, with_advantage
from clawloop.core.algorithms.losses import Divisor, StepLoss, step_loss
from clawloop.core.algorithms.rewards import has_drifted
from clawloop.core.algorithms.scoring import Comparison, Scores, choose_hint
from clawloop.core.algorithms.streams import Streams, logprobs_T
from clawloop.core.contracts.training import BatchSample, Distance, HintUse, SampleMetrics, StepFigures
from clawloop.core.errors import NothingToTrain, StepDiverged, StreamsUnusable
from clawloop.core.recipes.gate import TOKEN_LIMIT
from clawloop.core.recipes.recipe import CONTROL, Gate, Optimiser, Train
from clawloop.training.model.port import PolicyModel, full_tensor
from clawloop.training.model.token_scores import TokenScores
from clawloop.training.packing import Limits, MicroBatch
from clawloop.training.ranks import TRAINED_WORK, PaceMeter, Progress, ProgressCallback, Ranks, ignore_progress
from clawloop.training.scoring import (
    RankShard,
    ReadVersion,
    Scorer,
    ScoringPass,
    hinted_member,
    ids_at_positions,
    plan_scoring_passes,
    scores_by_sample,
    shard_batch,
)

# Streams before training ----------------------------------------------------------------------------------------------
# The streams of each sample before training: recorded log-probs, and the scores of policy, reference and teacher.


@dataclass(frozen=True, slots=True)
class BatchSignals:
    """Streams to train on of this rank's samples, by index in the batch, or the reasons that samples are dropped.

    Args:
        taught: the hints of those that have a teacher.
    """

    streams: dict[int, Streams]
    dropped: dict[int, str]
    taught: dict[int, list[HintUse]]


def gather_batch_signals(
    scorer: Scorer,
    samples: Sequence[BatchSample],
    shard: RankShard,
    recipe: Train,
    end_tokens: frozenset[int] = frozenset(),
) -> BatchSignals:
    """Runs the passes without gradient and combines their scores with what was recorded.

    Args:
        end_tokens: see `train_step`.

    Raises:
        StepDiverged: a pass gives numbers that are not finite.
        AdapterUnusable, AdapterUnreadable: a teacher's version cannot be used, or not now.
    """
    policy: dict[int, Scores] = {}
    reference: dict[int, Scores] = {}
    teacher: dict[int, Scores] = {}
    answered: dict[int, Scores] = {}
    compared: dict[int, Comparison] = {}
    for scoring_pass, micro_batches in shard.scored.items():
        scores, of_pass = scorer.score(scoring_pass, micro_batches)
        compared |= of_pass
        if scoring_pass.policy:
            policy = scores
        if scoring_pass.reference:
            reference = scores
        if scoring_pass.hinted:
            teacher |= scores
        answered |= {index: scores[index] for index in scoring_pass.answered if index in scores}
    signals = BatchSignals({}, {}, {})
    spared = end_tokens if recipe.distillation.spare_end else frozenset()
    for index in (member for micro_batch in shard.trained for member in micro_batch.members):
        sample = samples[index]
        try:
            streams = _streams(sample, reference.get(index), scorer.model.device)
            if places := recipe.places_read(sample.hinted_prompts):
                teacher_HT = _teachers(index, places, answered[index], teacher)
                streams, taught = _taught(streams, answered[index], teacher_HT, compared.get(index), places, recipe)
                streams = _without_gap(streams, sample.response_ids, spared)
                signals.taught[index] = taught
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
            signals.dropped[index] = _nothing_learned(signals.taught.get(index, ()), recipe)
        else:
            signals.streams[index] = streams
    return signals


def _streams(sample: BatchSample, reference: Scores | None, device: torch.device) -> Streams:
    mask = sample.response_mask or [True] * len(sample.response_ids)
    streams = Streams(
        response_mask_T=torch.tensor(mask, dtype=torch.bool),
        behaviour_logprob_T=logprobs_T(sample.logprobs, name="behaviour_logprob_T"),
    ).to(device)
    return replace(streams, reference_logprob_T=reference.logprob_T if reference else None)


def _teachers(index: int, places: Sequence[int], answered: Scores, scores: Mapping[int, Scores]) -> Tensor:
    """float[H, T], the teachers' log-probs of a sample's tokens, one teacher for each hint that was read.

    With a control they are moved as in `compare`, without its divisor: of these tokens alone it is not known. So a
    probability is 1 at most.
    """
    teacher_HT = torch.stack([scores[hinted_member(index, place)].logprob_T for place in places])
    control = scores.get(hinted_member(index, CONTROL))
    return teacher_HT if control is None else (teacher_HT + answered.logprob_T - control.logprob_T).clamp(max=0)


def _taught(
    streams: Streams,
    answered: Scores,
    teacher_HT: Tensor,
    compared: Comparison | None,
    places: Sequence[int],
    recipe: Train,
) -> tuple[Streams, list[HintUse]]:
    """The streams, completed with the teacher's numbers for each token, and the use of each hint.

    They stay as they are if each hint's teacher is further from the reply than `distillation.hint_distance`.

    Args:
        teacher_HT: float[H, T], see `_teachers`; in the order of `places`.
        compared: None unless distributions are distilled.
    """
    mask_T = streams.response_mask_T
    chosen_T = torch.zeros_like(mask_T, dtype=torch.int64)
    overlaps: list[float | None] = [None] * len(places)
    distances: list[float | None] = [None] * len(places)
    if compared is not None:
        per_token = recipe.distillation.hint_choice == "token_optimal"
        overlap_HT = compared.overlap_HT * mask_T
        overlaps = [*(overlap_HT.sum(dim=-1) / (mask_T.sum() * recipe.distillation.top_k)).tolist()]
        distance_H = (compared.distance_HT * mask_T).sum(dim=-1) / mask_T.sum()
        distances = [*distance_H.tolist()]
        far_H = distance_H > (recipe.distillation.hint_distance or math.inf)
        if far_H.all():
            return streams, [HintUse(*use, share=0.0) for use in zip(places, overlaps, distances, strict=True)]
        # No hint has an overlap below 0, so that one that is too far is chosen nowhere.
        chosen_T = choose_hint(overlap_HT.masked_fill(far_H[:, None], -1), per_token=per_token)
        at_T = torch.arange(len(mask_T), device=chosen_T.device)
        ids_TK, within_TK, answered_TK, teacher_TK, tail_T, *_ = (values[chosen_T, at_T] for values in compared)
        centred_T, gap_clip = mask_T if recipe.advantage.centre_gap else None, recipe.advantage.opd_clip
        streams = replace(
            streams,
            teacher_topk_ids_TK=ids_TK,
            teacher_topk_logprobs_TK=teacher_TK,
            teacher_tail_T=tail_T,
            answered_topk_logprobs_TK=answered_TK,
            topk_advantage_TK=support_advantage(teacher_TK, answered_TK, within_TK, gap_clip, centred_T),
        )
    streams = replace(
        streams,
        teacher_logprob_T=teacher_HT.gather(0, chosen_T[None])[0],
        answered_logprob_T=answered.logprob_T,
    )
    shares = [float((chosen_T == hint)[mask_T].double().mean()) for hint in range(len(places))]
    return streams, [HintUse(*use) for use in zip(places, overlaps, distances, shares, strict=True)]


def _without_gap(streams: Streams, response_ids: Sequence[int], tokens: frozenset[int]) -> Streams:
    """The streams without a gap of the teacher's at these tokens, where they were sampled or are compared."""
    if streams.teacher_logprob_T is None or streams.answered_logprob_T is None:
        return streams
    ends = torch.tensor(sorted(tokens), dtype=torch.int64, device=streams.teacher_logprob_T.device)
    sampled_T = torch.isin(torch.tensor(response_ids, device=ends.device), ends)
    spared = torch.where(sampled_T, streams.answered_logprob_T, streams.teacher_logprob_T)
    streams = replace(streams, teacher_logprob_T=spared)
    if streams.topk_advantage_TK is None or streams.teacher_topk_ids_TK is None:
        return streams
    at_end_TK = torch.isin(streams.teacher_topk_ids_TK, ends)
    return replace(streams, topk_advantage_TK=streams.topk_advantage_TK.masked_fill(at_end_TK, 0.0))


def _drift(policy: Scores, streams: Streams) -> float:
    """Mean |log ρ| over the trained tokens, in nats."""
    assert streams.behaviour_logprob_T is not None
    gap_T = (policy.logprob_T - streams.behaviour_logprob_T).abs()
    return float(gap_T[streams.response_mask_T].mean())


def _has_gradient(streams: Streams, recipe: Train) -> bool:
    """Whether a reward or a teacher gives this sample a gradient."""
    return streams.advantage_T is not None or (recipe.loss.distillation > 0 and streams.teacher_topk_ids_TK is not None)


def _nothing_learned(uses: Sequence[HintUse], recipe: Train) -> str:
    """The reason to leave out a sample without a gradient."""
    distances = [use.distance for use in uses if use.distance is not None]
    bound = recipe.distillation.hint_distance
    if not distances or bound is None:
        return "neither a verdict nor a hint that this recipe learns from"
    return (
        f"what it would learn from moves the whole reply, by {min(distances):.2f} nats a token, "
        f"bound {bound:g} (train.distillation.hint_distance)"
    )


# Distances after it ---------------------------------------------------------------------------------------------------
# Distance of a step's version from its parent and from the base, on the tokens it was trained on.


def distance(
    of: Mapping[int, Tensor], to: Mapping[int, Tensor], streams: Mapping[int, Streams], far: float, ranks: Ranks
) -> Distance | None:
    """The distance over the trained tokens of all ranks; None if a member has no log-probs to compare with.

    Args:
        of: member → float[T], log-probs of the new version.
        to: likewise of the version to compare with.
        streams: members that were trained, with their masks.
        far: beyond this a token counts as far.
    """
    gaps = {
        member: (of[member] - to[member]).abs()[of_member.response_mask_T]
        for member, of_member in streams.items()
        if member in of and member in to
    }
    complete = gaps.keys() == streams.keys()
    values = torch.cat([gap_T.double().cpu() for gap_T in gaps.values()]).tolist() if gaps else []
    gathered = ranks.all_gather((complete, values))
    all_values = torch.tensor(list(chain.from_iterable(part for _, part in gathered)), dtype=torch.float64)
    if not all(known for known, _ in gathered) or not len(all_values):
        return None
    return Distance(
        mean=float(all_values.clamp(max=TOKEN_LIMIT).mean()),
        median=float(all_values.median()),
        share=float((all_values > far).double().mean()),
    )


def token_moves(
    new: Mapping[int, Tensor], before: Mapping[int, Tensor], streams: Mapping[int, Streams]
) -> dict[int, list[float | None]]:
    """Member → by how much each token's log-probability changed, None for a token that was not trained.

    Args:
        new: member → float[T], log-probs of the version that the step made.
        before: likewise as the step began.
        streams: members that were trained, with their masks.
    """
    return {
        member: [
            moved if trained else None
            for moved, trained in zip(
                (new[member] - before[member]).tolist(), of_member.response_mask_T.bool().tolist(), strict=True
            )
        ]
        for member, of_member in streams.items()
    }


# The step -------------------------------------------------------------------------------------------------------------
# One training step: a batch of samples in, one optimiser update per epoch and the step's figures out.
#
# A number that is not finite, a ratio or a distance to the base out of bounds stop a step before the optimiser moves;
# scores of the new version that are not finite stop it afterwards.

Value = TypeVar("Value")

_REASONS_TOLD = 5  # each sample of the batch is told them


def make_optimizer(model: PolicyModel, settings: Optimiser) -> torch.optim.AdamW:
    """AdamW over the adapter. `checkpoint.begin` or `checkpoint.resume` sets its state."""
    return torch.optim.AdamW(
        list(model.adapter_parameters().values()),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


def train_step(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[BatchSample],
    recipe: Train,
    limits: Limits,
    *,
    parent: int = 0,
    read_version: ReadVersion | None = None,
    ranks: Ranks | None = None,
    on_progress: ProgressCallback | None = None,
    token_distance: float = Gate().token_distance,
    end_tokens: frozenset[int] = frozenset(),
) -> StepFigures:
    """Trains on one batch; the same figures on every rank.

    Args:
        model, optimizer: as `checkpoint.begin` or `checkpoint.resume` set them.
        samples: the whole batch, the same and in the same order on every rank.
        recipe: weights, bounds, epochs.
        limits: of samples and micro-batches.
        parent: the version of the model.
        read_version: loads an earlier version's adapter; needed if that version answered and its hint is used.
        ranks: the ranks that take the step; this process alone if None.
        on_progress: called after each micro-batch, on every rank.
        token_distance: beyond this a token has moved far, in nats.
        end_tokens: ids that end a turn or thinking, which `distillation.spare_end` keeps out of the teacher's gap.

    Raises:
        SampleUnusable: a sample is too long or malformed; nothing was computed.
        StepDiverged: a number is not finite, or over `recipe.bounds`. The model in memory may have changed, so
            continue from the last committed version.
        NothingToTrain: no sample is left to learn from.
        AdapterUnusable, AdapterUnreadable: a teacher's version cannot be used, or not now.
    """
    ranks = ranks or Ranks()
    on_progress = on_progress or ignore_progress
    passes = plan_scoring_passes(samples, recipe, parent)
    shard = shard_batch(samples, limits, passes, rank=ranks.rank, world_size=ranks.world_size)
    on_progress = PaceMeter(on_progress, _work(shard, recipe))
    scorer = Scorer(model, parent, read_version, ranks, on_progress)
    signals = gather_batch_signals(scorer, samples, shard, recipe, end_tokens)
    dropped = _merge(ranks.all_gather(signals.dropped))
    divisor = sum(ranks.all_gather(Divisor.of(signals.streams.values())), start=Divisor(0, 0))
    sequences = _sequence_tokens(samples, signals, ranks)
    divisor = replace(divisor, sequences=len(sequences))
    if divisor.samples == 0:
        reasons = sorted(set(dropped.values()))
        more = f" and {len(reasons) - _REASONS_TOLD} more" if len(reasons) > _REASONS_TOLD else ""
        raise NothingToTrain(f"no sample of {len(samples)} is left: {'; '.join(reasons[:_REASONS_TOLD])}{more}")
    of_sample = {index: sequences[_sequence(samples[index])] for index in signals.streams}
    epochs: list[_Epoch] = []
    for _ in range(recipe.optimiser.epochs):
        optimizer.zero_grad(set_to_none=True)
        epoch = _accumulate_gradient(model, shard, signals, recipe, divisor, of_sample, ranks, on_progress)
        if not model.is_sharded:
            ranks.sum_gradients(model.adapter_parameters().values())
        norm = clip_grad_norm_(model.adapter_parameters().values(), recipe.optimiser.grad_clip)
        epochs.append(replace(epoch, grad_norm=float(full_tensor(norm))))
        _check_bounds(epochs[-1], recipe)
        optimizer.step()
    advantages = _merge(ranks.all_gather({index: _advantages(streams) for index, streams in signals.streams.items()}))
    taught = _merge(ranks.all_gather(signals.taught))
    first, last = epochs[0], epochs[-1]
    began = time.monotonic()
    made, _ = scorer.score(ScoringPass(version=parent, made=True), shard.trained)
    new = {member: scores.logprob_T for member, scores in made.items()}
    moves, moves_seconds = dict[int, list[float | None]](), None
    if recipe.token_moves:
        moves = _merge(ranks.all_gather(token_moves(new, first.logprobs, signals.streams)))
        moves_seconds = time.monotonic() - began
    references = {m: s.reference_logprob_T for m, s in signals.streams.items() if s.reference_logprob_T is not None}
    to_parent = distance(new, first.logprobs, signals.streams, token_distance, ranks)
    to_base = distance(new, references, signals.streams, token_distance, ranks) if recipe.loss.kl > 0 else None
    distance_seconds = time.monotonic() - began
    fillers = ranks.all_gather([micro_batch.is_filler for micro_batch in shard.trained])
    return StepFigures(
        loss=last.loss,
        parts=last.parts,
        grad_norm=last.grad_norm,
        ratio=first.ratio,
        kl=first.kl,
        tokens=divisor.tokens,
        samples={samples[index].sample_id: first.metrics[index] for index in sorted(first.metrics)},
        dropped={samples[index].sample_id: dropped[index] for index in sorted(dropped)},
        taught={samples[index].sample_id: taught[index] for index in sorted(taught) if index in first.metrics},
        advantages={samples[index].sample_id: found for index in sorted(advantages) if (found := advantages[index])},
        moves={samples[index].sample_id: moves[index] for index in sorted(moves)},
        moves_seconds=moves_seconds,
        micro_batches=sum(len(of_rank) for of_rank in fillers),
        fillers=sum(sum(of_rank) for of_rank in fillers),
        to_parent=to_parent,
        to_base=to_base,
        distance_seconds=distance_seconds,
    )


def _work(shard: RankShard, recipe: Train) -> int:
    """Work of this rank in tokens read; a trained token counts as often as its cost in reads."""
    trained = sum(micro_batch.tokens_S.numel() for micro_batch in shard.trained)
    scored = sum(micro_batch.tokens_S.numel() for of_pass in shard.scored.values() for micro_batch in of_pass)
    return scored + trained * (TRAINED_WORK * recipe.optimiser.epochs + 1)


def _advantages(streams: Streams) -> list[float | None]:
    """Advantage of each token of the reply; empty if the step has none."""
    if streams.advantage_T is None:
        return []
    trained = streams.response_mask_T.bool().tolist()
    return [value if used else None for value, used in zip(streams.advantage_T.tolist(), trained, strict=True)]


def _sequence(sample: BatchSample) -> str:
    """Id of the sample's sequence; the turns of an episode are one sequence."""
    return str(sample.sample_id if sample.episode is None else sample.episode)


def _sequence_tokens(samples: Sequence[BatchSample], signals: BatchSignals, ranks: Ranks) -> dict[str, int]:
    """Trained tokens of each sequence, over all ranks."""
    own: dict[str, int] = {}
    for index, streams in signals.streams.items():
        sequence = _sequence(samples[index])
        own[sequence] = own.get(sequence, 0) + streams.trained_tokens
    total: dict[str, int] = {}
    for of_rank in ranks.all_gather(own):
        for sequence, tokens in of_rank.items():
            total[sequence] = total.get(sequence, 0) + tokens
    return total


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Figures of one pass with gradient over the whole batch, of all ranks."""

    loss: float
    parts: dict[str, float]
    metrics: dict[int, SampleMetrics]
    logprobs: dict[int, Tensor]  # of this rank's samples, as the epoch began
    grad_norm: float = math.nan  # known after the last micro-batch

    @property
    def ratio(self) -> float:
        mean = _token_mean((m.tokens, m.ratio_mean) for m in self.metrics.values())
        assert mean is not None  # log-probs recorded when sampling are never missing
        return mean

    @property
    def kl(self) -> float | None:
        return _token_mean((m.tokens, m.kl) for m in self.metrics.values())

    @property
    def bounded_ratio(self) -> float | None:
        return _token_mean((m.tokens, m.bounded_ratio) for m in self.metrics.values())

    @property
    def bounded_kl(self) -> float | None:
        return _token_mean((m.tokens, m.bounded_kl) for m in self.metrics.values())


def _accumulate_gradient(
    model: PolicyModel,
    shard: RankShard,
    signals: BatchSignals,
    recipe: Train,
    divisor: Divisor,
    sequence_tokens: Mapping[int, int],
    ranks: Ranks,
    on_progress: ProgressCallback,
) -> _Epoch:
    """Leaves the batch's gradient on the adapter's parameters.

    Args:
        sequence_tokens: for this rank's samples, the trained tokens of the sequence each belongs to.
    """
    results: list[StepLoss] = []
    metrics: dict[int, SampleMetrics] = {}
    logprobs: dict[int, Tensor] = {}
    for done, micro_batch in enumerate(shard.trained, start=1):
        on_device = micro_batch.to(model.device)
        members = [member for member in micro_batch.members if member in signals.streams]
        # Forward and backward pass of a sharded model are collectives.
        with ranks.raise_on_all_ranks(not model.is_sharded):
            token_scores: TokenScores = model(
                on_device, entropies=recipe.loss.entropy > 0, at_ids_NK=_compared_ids(on_device, signals.streams)
            )
            # A micro-batch without a sample to learn from still takes part in FSDP's backward pass.
            objective = token_scores.logprobs_N.sum() * 0
            with ranks.raise_on_all_ranks(model.is_sharded):
                if members:
                    scores = scores_by_sample(on_device, token_scores)
                    pairs = [(_comparable(scores[m], signals.streams[m]), signals.streams[m]) for m in members]
                    result = step_loss(pairs, recipe, divisor, [sequence_tokens[member] for member in members])
                    objective = result.loss
                    results.append(result)
                    metrics |= dict(zip(members, result.metrics, strict=True))
                    logprobs |= {member: scores[member].logprob_T.detach() for member in members}
            # FSDP averages gradients over ranks; the divisor already counts all of them.
            (objective * (ranks.world_size if model.is_sharded else 1)).backward()  # type: ignore[no-untyped-call]
        on_progress(Progress("train", done, len(shard.trained), tokens=micro_batch.tokens_S.numel()))
    parts: dict[str, float] = {}
    for of_rank in ranks.all_gather([result.parts for result in results]):
        for of_micro_batch in of_rank:
            for part, value in of_micro_batch.items():
                parts[part] = parts.get(part, 0.0) + value
    return _Epoch(sum(parts.values()), parts, _merge(ranks.all_gather(metrics)), logprobs)


def _compared_ids(micro_batch: MicroBatch, streams: Mapping[int, Streams]) -> Tensor | None:
    """int64[N, K], the ids at which teachers were scored; positions of samples without a teacher get arbitrary ids."""
    known = {m: s.teacher_topk_ids_TK for m in micro_batch.members if (s := streams.get(m)) is not None}
    return ids_at_positions(micro_batch, {member: ids_TK for member, ids_TK in known.items() if ids_TK is not None})


def _comparable(scores: Scores, streams: Streams) -> Scores:
    """The scores, without the top-k part if its ids were not chosen by the teacher."""
    if streams.teacher_topk_ids_TK is not None:
        return scores
    return replace(scores, topk_logprobs_TK=None, tail_T=None)


def _check_bounds(epoch: _Epoch, recipe: Train) -> None:
    if not (math.isfinite(epoch.loss) and math.isfinite(epoch.grad_norm)):
        raise StepDiverged(f"loss {epoch.loss}, gradient norm {epoch.grad_norm}")
    # The plain means can be those of one token, and are only reported.
    if epoch.bounded_ratio is not None and not epoch.bounded_ratio <= recipe.bounds.ratio:
        raise StepDiverged(f"mean ratio {epoch.bounded_ratio:.3g}, bound {recipe.bounds.ratio:g}")
    if epoch.bounded_kl is not None and not epoch.bounded_kl <= recipe.bounds.kl:
        raise StepDiverged(f"mean KL to the base {epoch.bounded_kl:.3g}, bound {recipe.bounds.kl:g}")


def _token_mean(pairs: Iterable[tuple[int, float | None]]) -> float | None:
    """Mean of the known values, weighted by their tokens; None if no value is known."""
    known = [(tokens, value) for tokens, value in pairs if value is not None]
    tokens = sum(count for count, _ in known)
    return sum(count * value for count, value in known) / tokens if tokens else None


def _merge(parts: Iterable[Mapping[int, Value]]) -> dict[int, Value]:
    return {index: value for part in parts for index, value in part.items()}
