"""Scores of samples under versions of the policy: the forward passes without gradient, packed and sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from clawloop.core.algorithms.scoring import Comparison, Scores, TopKOf
from clawloop.core.contracts.training import BatchSample
from clawloop.core.errors import AdapterUnusable, SampleUnusable
from clawloop.core.recipes.recipe import CONTROL, MOST_HINTS, Train
from clawloop.training.batch import hinted_sequence, plain_sequence
from clawloop.training.model.port import PolicyModel, adapter_tensors, set_adapter
from clawloop.training.model.token_scores import Compared, Comparing, TokenScores
from clawloop.training.packing import (
    Limits,
    MicroBatch,
    TokenSequence,
    check_limits,
    collate,
    filler,
    plan_micro_batches,
)
from clawloop.training.ranks import Progress, ProgressCallback, Ranks

# Passes ---------------------------------------------------------------------------------------------------------------
# The forward passes of a step: which documents each version scores, packed into micro-batches and sharded over ranks.
#
# A hidden state depends on the weights and on the tokens up to it. So all documents that the same weights score before
# training form one pass, in which a hinted prompt shares the prefix of its plain prompt. Every rank computes the same
# plan for all ranks from the same batch, so the ranks need not exchange how many forwards each runs.
#
# The pass with gradient has no hinted prompts, not even where it runs under the teacher's weights: each token from the
# hint on would be computed again and differentiated for nothing, which over the turns of a session costs more than the
# shared prefix saves; and the loss's divisor is known only once all teachers have scored.

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
        hinted: members of the hinted documents that are scored, as teachers; see `hinted_member`.
        answered: indices of the samples whose plain document is scored, as the version that answered them. Where that
            version is the teacher too, one pass reads all their documents, so that their difference is the hint alone.
        top_k: also compare a sample's documents at K ids of each position; they are in one micro-batch then.
        top_k_of: whose most likely ids.
    """

    version: int
    policy: bool = False
    reference: bool = False
    made: bool = False
    hinted: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()
    top_k: int | None = None
    top_k_of: TopKOf = "student"

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
    distillation = recipe.distillation if recipe.loss.distillation > 0 else None
    hinted: defaultdict[int, list[int]] = defaultdict(list)
    answered: defaultdict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if places := recipe.documents_read(sample.hinted_prompts):
            teacher = recipe.teacher_version(sample.version)
            hinted[teacher] += [hinted_member(index, place) for place in places]
            answered[sample.version].append(index)
    explicit = any(sample.explicit for sample in samples)
    policy = parent if explicit or recipe.loss.correction == "decoupled" else None
    reference = 0 if recipe.loss.kl > 0 else None
    versions = {version for version in (policy, reference, *hinted, *answered) if version is not None}
    return tuple(
        ScoringPass(
            version=version,
            policy=version == policy,
            reference=version == reference,
            hinted=tuple(hinted[version]),
            answered=tuple(answered[version]),
            top_k=distillation.top_k if distillation and hinted[version] else None,
            top_k_of=distillation.top_k_of if distillation and hinted[version] else "student",
        )
        for version in sorted(versions, key=lambda version: (version != policy, version))
    )


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's part of a batch.

    Args:
        trained: the micro-batches of the pass with gradient; the same number on every rank, the last ones may be
            fillers. Their members are indices of samples.
        scored: likewise for each pass without gradient, in the order in which the passes run. A sample's plain document
            is the member `index`, a hinted document `hinted_member(index, place)`.
    """

    trained: tuple[MicroBatch, ...]
    scored: Mapping[ScoringPass, tuple[MicroBatch, ...]]


_PLACES = MOST_HINTS + 1  # of hints, and the control's


def hinted_member(index: int, place: int = 0) -> int:
    """Member key of sample i's document with the hint at this place, or with the control; below 0."""
    return ~(index * _PLACES + place)


def place_of(member: int) -> tuple[int, int]:
    """Sample and place of the hint of a hinted document."""
    return divmod(~member, _PLACES)


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
        of_pass = {
            member: hinted_sequence(samples[index], place)
            for member in scoring_pass.hinted
            for index, place in [place_of(member)]
        }
        of_pass |= documents if scoring_pass.plain else {index: documents[index] for index in scoring_pass.answered}
        planned = _plan_per_rank(of_pass, per_rank, limits, together=scoring_pass.top_k is not None)
        scored[scoring_pass] = _collate_rank(of_pass, planned, rank, limits)
    return RankShard(trained, scored)


def _plan_per_rank(
    documents: Mapping[int, TokenSequence], per_rank: Sequence[Bins], limits: Limits, *, together: bool
) -> list[Bins]:
    """Micro-batches of a pass's documents, each on the rank that trains its sample.

    Args:
        together: a sample's documents are in one micro-batch.
    """
    planned: list[Bins] = []
    for bins in per_rank:
        keys: list[int] = []
        groups: list[tuple[int, ...]] = []
        for sample in (index for members in bins for index in members):
            possible = (sample, *(hinted_member(sample, place) for place in range(_PLACES)))
            of_sample = [key for key in possible if key in documents]
            groups.append(tuple(range(len(keys), len(keys) + len(of_sample))))
            keys += of_sample
        groups = [group for group in groups if together and len(group) > 1]
        positions = plan_micro_batches([documents[key] for key in keys], limits, groups)
        planned.append([tuple(keys[position] for position in members) for members in positions])
    return planned


def _collate_rank(
    documents: Mapping[int, TokenSequence], per_rank: Sequence[Bins], rank: int, limits: Limits
) -> tuple[MicroBatch, ...]:
    """One rank's micro-batches, filled up to the largest number that any rank has."""
    batches = [collate(documents, members, share_prefixes=limits.share_prefixes) for members in per_rank[rank]]
    missing = max(len(bins) for bins in per_rank) - len(batches)
    return tuple(batches + [filler()] * missing)


# Versions -------------------------------------------------------------------------------------------------------------
# Scores of samples under one version of the policy: the forward passes without gradient.

ReadVersion = Callable[[int], Mapping[str, Tensor]]
"""Returns the adapter tensors of an earlier version (`files.read_adapter`)."""


def scores_by_sample(micro_batch: MicroBatch, scores: TokenScores) -> dict[int, Scores]:
    """A micro-batch's scores, split by member.

    Raises:
        StepDiverged: a number is not finite.
    """
    columns = {
        "logprob_T": scores.logprobs_N,
        "entropy_T": scores.entropies_N,
        "topk_logprobs_TK": scores.topk_logprobs_NK,
        "tail_T": scores.tails_N,
    }
    split = {name: micro_batch.split(values) for name, values in columns.items() if values is not None}
    return {member: Scores(**{name: parts[member] for name, parts in split.items()}) for member in micro_batch.members}


def ids_at_positions(micro_batch: MicroBatch, ids: Mapping[int, Tensor]) -> Tensor | None:
    """int64[N, K] of the given ids, [T, K] for some members; positions of other members get arbitrary ids.

    None if no member of the micro-batch has ids.
    """
    given = {member: ids[member] for member in micro_batch.members if member in ids}
    if not given:
        return None
    like = next(iter(given.values()))
    arbitrary = torch.arange(like.shape[1], device=like.device)
    for member, length in zip(micro_batch.members, micro_batch.response_lengths, strict=True):
        given.setdefault(member, arbitrary.expand(length, -1))
    return micro_batch.join(given)


def _groups(members: Sequence[int]) -> dict[int, Compared]:
    """Sample with a hint → its documents, as indices of `members`, the hinted ones by their hints' places."""
    at = {member: index for index, member in enumerate(members)}
    hinted: defaultdict[int, list[int]] = defaultdict(list)
    for member in sorted((member for member in members if member < 0), reverse=True):
        sample, place = place_of(member)
        if place != CONTROL:
            hinted[sample].append(at[member])
    return {
        sample: Compared(at[sample], at.get(hinted_member(sample, CONTROL)), tuple(documents))
        for sample, documents in hinted.items()
    }


@dataclass(frozen=True, slots=True)
class Scorer:
    """Runs one rank's part of the passes without gradient.

    Args:
        model: the policy at the step's begin.
        parent: its version.
        read_version: loads an earlier version's adapter, the teacher of hints to its answers.
        ranks: the ranks of the step.
        on_progress: called after each micro-batch.
    """

    model: PolicyModel
    parent: int
    read_version: ReadVersion | None
    ranks: Ranks
    on_progress: ProgressCallback

    @torch.no_grad()
    def score(
        self, scoring_pass: ScoringPass, micro_batches: Sequence[MicroBatch]
    ) -> tuple[dict[int, Scores], dict[int, Comparison]]:
        """Scores of the members of these micro-batches, and by sample the comparison of its documents, if requested."""
        scores: dict[int, Scores] = {}
        compared: dict[int, Comparison] = {}
        with nullcontext() if scoring_pass.made else self._as_version(scoring_pass.version):
            for done, micro_batch in enumerate(micro_batches, start=1):
                on_device = micro_batch.to(self.model.device)
                groups = _groups(on_device.members) if scoring_pass.top_k else {}
                comparing = None
                if groups:
                    comparing = Comparing(tuple(groups.values()), scoring_pass.top_k or 0, scoring_pass.top_k_of)
                # A sharded model's forward pass is a collective.
                with self.ranks.raise_on_all_ranks(not self.model.is_sharded):
                    token_scores: TokenScores = self.model(on_device, comparing=comparing)
                    with self.ranks.raise_on_all_ranks(self.model.is_sharded):
                        scores |= scores_by_sample(on_device, token_scores)
                compared |= dict(zip(groups, token_scores.compared, strict=True))
                self.on_progress(
                    Progress(scoring_pass.stage, done, len(micro_batches), tokens=micro_batch.tokens_S.numel())
                )
        return scores, compared

    @contextmanager
    def _as_version(self, version: int) -> Iterator[None]:
        """Within the block, the model has this version's adapter."""
        if version == 0:
            with self.model.without_adapter():
                yield
        elif version == self.parent:
            yield
        else:
            if self.read_version is None:
                raise AdapterUnusable(f"version {version} is a teacher, but there is no way to read it")
            current = adapter_tensors(self.model)
            with self.ranks.raise_on_all_ranks():
                set_adapter(self.model, self.read_version(version))
            try:
                yield
            finally:
                set_adapter(self.model, current)


# Whole replies --------------------------------------------------------------------------------------------------------
# Mean log-probability of whole replies under a model's present weights, without gradient.


def score_replies(
    model: PolicyModel, samples: Sequence[BatchSample], limits: Limits, ranks: Ranks, on_progress: ProgressCallback
) -> dict[int, float]:
    """Index of the sample → mean log-probability of its reply's tokens in nats; the same on every rank.

    Samples that are malformed or beyond the limits are left out.
    """
    usable = {index: sample for index, sample in enumerate(samples) if fits(sample, limits)}
    if not usable:
        return {}
    places = list(usable)
    shard = shard_batch(list(usable.values()), limits, (), rank=ranks.rank, world_size=ranks.world_size)
    scores, _ = Scorer(model, 0, None, ranks, on_progress).score(ScoringPass(version=0, made=True), shard.trained)
    means = {places[member]: float(of_reply.logprob_T.mean()) for member, of_reply in scores.items()}
    return {index: mean for of_rank in ranks.all_gather(means) for index, mean in of_rank.items()}


def fits(sample: BatchSample, limits: Limits) -> bool:
    """Whether the model can read the sample's prompt and reply."""
    try:
        check_limits(plain_sequence(sample), limits)
    except SampleUnusable:
        return False
    return True
