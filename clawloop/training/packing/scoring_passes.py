"""The forward passes of a step: who reads which documents, and the micro-batches they make, shared out among ranks.

Knows nothing about models or losses. A hidden state depends on the tokens up to it and on the weights, so before the
step trains, all that is to be read under the same weights is one pass, in which a hinted prompt is read once with the
plain prompt it begins like. Every rank computes the same plan for all ranks from the same batch, so that nobody has to
ask how many forwards the others will run.

The pass with gradient takes no hinted prompts in, not even where it runs under their teacher's weights: each token from
the hint on would be computed again and differentiated for nothing, which over the turns of a session costs more than
their common beginning saves, and the loss's divisor counts the samples that are left once all teachers have read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from clawloop.recipes.recipe import Train
from clawloop.training.batch import TrainingSample
from clawloop.training.packing.collate import Limits, Packed, TokenSequence, collate, filler, plan

Bins: TypeAlias = Sequence[tuple[int, ...]]
"""Micro-batches, as numbers of documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPass:
    """What is read without gradient under one version's weights.

    Args:
        version: 0 is the base model.
        policy, reference: every sample's plain document is read, as by the policy that the step begins with, as by
            the base model; both where that is the same.
        hinted: indices of the samples whose hinted document is read, as by their teacher.
        top_k: so many ids are found as well at which student and teacher are compared: the teacher's most likely
            ones at each position if hinted documents are read, else the student's.
    """

    version: int
    policy: bool = False
    reference: bool = False
    hinted: tuple[int, ...] = ()
    top_k: int | None = None

    @property
    def plain(self) -> bool:
        return self.policy or self.reference

    @property
    def stage(self) -> str:
        """In words, e.g. `reference and teacher`."""
        read = {"policy": self.policy, "reference": self.reference, "teacher": bool(self.hinted)}
        return " and ".join(who for who, reads in read.items() if reads)


def passes_before(samples: Sequence[TrainingSample], recipe: Train, parent: int) -> tuple[ScoringPass, ...]:
    """The passes without gradient that the recipe and the batch need, in the order in which they are run.

    Args:
        samples: the whole batch.
        recipe: who teaches, what the loss compares.
        parent: the version the step begins with.
    """
    hinted = _by_teacher(samples, recipe)
    top_k = recipe.distillation.top_k if recipe.loss.distillation > 0 and hinted else None
    of_student = top_k if recipe.distillation.top_k_of == "student" else None
    explicit = any(sample.explicit for sample in samples)
    policy = parent if explicit or of_student or recipe.loss.correction == "decoupled" else None
    reference = 0 if recipe.loss.kl > 0 else None
    versions = {version for version in (policy, reference, *hinted) if version is not None}
    passes = []
    for version in sorted(versions, key=lambda version: (version != policy, version)):
        of_version = ScoringPass(
            version=version,
            policy=version == policy,
            reference=version == reference,
            hinted=hinted.get(version, ()),
            top_k=None if of_student or version not in hinted else top_k,
        )
        if of_student and of_version.policy:
            # The teachers are asked about the ids found here: it comes first, and reads no hinted prompt.
            passes.append(replace(of_version, hinted=(), top_k=of_student))
            of_version = replace(of_version, policy=False, reference=False)
        if of_version.plain or of_version.hinted:
            passes.append(of_version)
    return tuple(passes)


def _by_teacher(samples: Sequence[TrainingSample], recipe: Train) -> dict[int, tuple[int, ...]]:
    """The teacher's version → indices of the samples it reads the hinted prompt of; nothing if no hint is read."""
    found: dict[int, list[int]] = {}
    if recipe.uses_hints:
        for index, sample in enumerate(samples):
            if sample.hinted_prompt_ids is not None:
                found.setdefault(recipe.teacher_version(sample.version), []).append(index)
    return {version: tuple(indices) for version, indices in found.items()}


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's part of a batch.

    Args:
        packs: the micro-batches that are trained; as many as every other rank has, the last ones perhaps fillers.
            Their members are indices of samples.
        before: the micro-batches of each pass without gradient, likewise, in the order in which they are run. Of a
            sample's two documents the plain one is the member `index`, the hinted one `of_hint(index)`.
    """

    packs: tuple[Packed, ...]
    before: Mapping[ScoringPass, tuple[Packed, ...]]


def of_hint(index: int) -> int:
    """The number below 0 that a sample's hinted document has among the members of a micro-batch; and the way back."""
    return ~index


def shard_batch(
    samples: Sequence[TrainingSample], limits: Limits, passes: Sequence[ScoringPass], *, rank: int, world: int
) -> RankShard:
    """This rank's part. All documents of a sample are read on the rank that trains it.

    Args:
        samples: the whole batch, the same on every rank.
        limits: what the trainer takes, for hinted prompts too.
        passes: those without gradient.
        rank, world: of how many.

    Raises:
        SampleUnusable: see `plan`; on every rank alike.
    """
    documents = {index: sample.sequence() for index, sample in enumerate(samples)}
    bins = plan(list(documents.values()), limits)
    per_rank: list[Bins] = [bins[first::world] for first in range(world)]
    packs = _packs(documents, per_rank, rank, limits)
    before = {}
    for one in passes:
        if not one.hinted:
            before[one] = packs
            continue
        read = {of_hint(index): samples[index].hinted_sequence() for index in one.hinted}
        if one.plain:
            read |= documents
        before[one] = _packs(read, _plan_per_rank(read, per_rank, limits), rank, limits)
    return RankShard(packs, before)


def _plan_per_rank(read: Mapping[int, TokenSequence], per_rank: Sequence[Bins], limits: Limits) -> list[Bins]:
    """Micro-batches of the documents that are read, each on the rank that trains its sample."""
    planned: list[Bins] = []
    for bins in per_rank:
        samples = [index for members in bins for index in members]
        own = [document for index in samples for document in (index, of_hint(index)) if document in read]
        places = plan([read[document] for document in own], limits)
        planned.append([tuple(own[place] for place in members) for members in places])
    return planned


def _packs(
    documents: Mapping[int, TokenSequence], per_rank: Sequence[Bins], rank: int, limits: Limits
) -> tuple[Packed, ...]:
    packs = [collate(documents, members, share_prefixes=limits.share_prefixes) for members in per_rank[rank]]
    missing = max(len(bins) for bins in per_rank) - len(packs)
    return tuple(packs + [filler()] * missing)
