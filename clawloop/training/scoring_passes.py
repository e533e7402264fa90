"""The forward passes of a step: which documents each version scores, packed into micro-batches and sharded over ranks.

A hidden state depends on the weights and on the tokens up to it. So all documents that the same weights score before
training form one pass, in which a hinted prompt shares the prefix of its plain prompt. Every rank computes the same
plan for all ranks from the same batch, so the ranks need not exchange how many forwards each runs.

The pass with gradient has no hinted prompts, not even where it runs under the teacher's weights: each token from the
hint on would be computed again and differentiated for nothing, which over the turns of a session costs more than the
shared prefix saves; and the loss's divisor is known only once all teachers have scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from clawloop.contracts.training import BatchSample
from clawloop.recipes.recipe import Train
from clawloop.training.batch import hinted_sequence, plain_sequence
from clawloop.training.packing.collate import MicroBatch, collate, filler
from clawloop.training.packing.plan import plan_micro_batches
from clawloop.training.packing.sequences import Limits, TokenSequence

Bins: TypeAlias = Sequence[tuple[int, ...]]
"""Micro-batches, as keys of documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPass:
    """The documents that one version scores without gradient.

    Args:
        version: 0 is the base model.
        policy, reference: score every sample's plain document, as the policy at the step's begin, as the base model;
            both if that is the same version.
        made: scores every sample's plain document after the last update, under the weights that the step made.
        hinted: indices of the samples whose hinted document is scored, as their teacher.
        answered: indices of the samples whose plain document is scored, as the version that answered them. Where that
            version is the teacher too, one pass reads both documents, so that their difference is the hint alone.
        top_k: also find the K ids at which student and teacher are compared: the teacher's most likely ones at each
            position if hinted documents are scored, else the student's.
    """

    version: int
    policy: bool = False
    reference: bool = False
    made: bool = False
    hinted: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()
    top_k: int | None = None

    @property
    def plain(self) -> bool:
        return self.policy or self.reference

    @property
    def stage(self) -> str:
        """The roles of the version for progress reports, e.g. `reference and teacher`; `answered` without another."""
        roles = {"policy": self.policy, "reference": self.reference, "teacher": bool(self.hinted), "check": self.made}
        return " and ".join(role for role, scores in roles.items() if scores) or "answered"


def plan_scoring_passes(samples: Sequence[BatchSample], recipe: Train, parent: int) -> tuple[ScoringPass, ...]:
    """The passes without gradient that the recipe and the batch need, in the order in which they run.

    Args:
        samples: the whole batch.
        recipe: selects the teachers and the parts of the loss.
        parent: the version the step begins with.
    """
    hinted = _hinted_samples(samples, recipe, recipe.teacher_version)
    answered = _hinted_samples(samples, recipe, lambda version: version) if recipe.uses_gap else {}
    top_k = recipe.distillation.top_k if recipe.loss.distillation > 0 and hinted else None
    student_top_k = top_k if recipe.distillation.top_k_of == "student" else None
    explicit = any(sample.explicit for sample in samples)
    policy = parent if explicit or student_top_k or recipe.loss.correction == "decoupled" else None
    reference = 0 if recipe.loss.kl > 0 else None
    versions = {version for version in (policy, reference, *hinted, *answered) if version is not None}
    passes = []
    for version in sorted(versions, key=lambda version: (version != policy, version)):
        scoring_pass = ScoringPass(
            version=version,
            policy=version == policy,
            reference=version == reference,
            hinted=hinted.get(version, ()),
            answered=answered.get(version, ()),
            top_k=None if student_top_k or version not in hinted else top_k,
        )
        if student_top_k and scoring_pass.policy:
            # The teachers are scored at the ids found here, so this pass comes first, without hinted prompts.
            passes.append(replace(scoring_pass, hinted=(), answered=(), top_k=student_top_k))
            scoring_pass = replace(scoring_pass, policy=False, reference=False)
        if scoring_pass.plain or scoring_pass.hinted or scoring_pass.answered:
            passes.append(scoring_pass)
    return tuple(passes)


def _hinted_samples(
    samples: Sequence[BatchSample], recipe: Train, read_by: Callable[[int], int]
) -> dict[int, tuple[int, ...]]:
    """Version → indices of the samples with a hint that it scores; empty if the recipe uses no hints.

    Args:
        read_by: the version that scores a sample, by the version that answered.
    """
    indices: dict[int, list[int]] = {}
    if recipe.uses_hints:
        for index, sample in enumerate(samples):
            if sample.hinted_prompt_ids is not None:
                indices.setdefault(read_by(sample.version), []).append(index)
    return {version: tuple(of_version) for version, of_version in indices.items()}


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's part of a batch.

    Args:
        trained: the micro-batches of the pass with gradient; the same number on every rank, the last ones may be
            fillers. Their members are indices of samples.
        scored: likewise for each pass without gradient, in the order in which the passes run. A sample's plain document
            is the member `index`, its hinted document `hinted_member(index)`.
    """

    trained: tuple[MicroBatch, ...]
    scored: Mapping[ScoringPass, tuple[MicroBatch, ...]]


def hinted_member(index: int) -> int:
    """Member key of sample i's hinted document in a micro-batch: −i−1. Its own inverse."""
    return ~index


def shard_batch(
    samples: Sequence[BatchSample], limits: Limits, passes: Sequence[ScoringPass], *, rank: int, world_size: int
) -> RankShard:
    """This rank's part of the batch. The rank that trains a sample also scores all its documents.

    Args:
        samples: the whole batch, the same on every rank.
        limits: of plain and hinted sequences.
        passes: those without gradient.
        rank, world_size: this rank, and the number of ranks.

    Raises:
        SampleUnusable: a sample is malformed or beyond the limits; on every rank alike.
    """
    documents = {index: plain_sequence(sample) for index, sample in enumerate(samples)}
    bins = plan_micro_batches(list(documents.values()), limits)
    per_rank: list[Bins] = [bins[first::world_size] for first in range(world_size)]
    trained = _collate_rank(documents, per_rank, rank, limits)
    scored = {}
    for scoring_pass in passes:
        if scoring_pass.plain and not scoring_pass.hinted:
            scored[scoring_pass] = trained
            continue
        of_pass = {hinted_member(index): hinted_sequence(samples[index]) for index in scoring_pass.hinted}
        of_pass |= documents if scoring_pass.plain else {index: documents[index] for index in scoring_pass.answered}
        scored[scoring_pass] = _collate_rank(of_pass, _plan_per_rank(of_pass, per_rank, limits), rank, limits)
    return RankShard(trained, scored)


def _plan_per_rank(documents: Mapping[int, TokenSequence], per_rank: Sequence[Bins], limits: Limits) -> list[Bins]:
    """Micro-batches of a pass's documents, each on the rank that trains its sample."""
    planned: list[Bins] = []
    for bins in per_rank:
        samples = [index for members in bins for index in members]
        keys = [key for index in samples for key in (index, hinted_member(index)) if key in documents]
        positions = plan_micro_batches([documents[key] for key in keys], limits)
        planned.append([tuple(keys[position] for position in members) for members in positions])
    return planned


def _collate_rank(
    documents: Mapping[int, TokenSequence], per_rank: Sequence[Bins], rank: int, limits: Limits
) -> tuple[MicroBatch, ...]:
    """One rank's micro-batches, filled up to the largest number that any rank has."""
    batches = [collate(documents, members, share_prefixes=limits.share_prefixes) for members in per_rank[rank]]
    missing = max(len(bins) for bins in per_rank) - len(batches)
    return tuple(batches + [filler()] * missing)
