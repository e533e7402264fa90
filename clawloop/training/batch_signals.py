"""What a step knows about each of its tokens before it trains: the passes without gradient.

Knows nothing about losses. Up to three readers, each only if the recipe and the batch need it: the policy as
the step begins, the base model as reference, and the teacher, who reads the prompt with the hint in it. Those that
are the same version read in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clawloop.algorithms.advantages import with_advantage
from clawloop.algorithms.scoring import Scores
from clawloop.algorithms.staleness import has_drifted
from clawloop.algorithms.streams import Streams, logprobs_T
from clawloop.errors import AdapterUnusable, NothingToTrain, StreamsUnusable
from clawloop.recipes.recipe import Train
from clawloop.training.batch import TrainingSample
from clawloop.training.model.decoder import PolicyModel, TokenScores
from clawloop.training.model.loading import adapter_tensors, set_adapter
from clawloop.training.packing.collate import Packed
from clawloop.training.packing.scoring_passes import RankShard, ScoringPass, of_hint
from clawloop.training.ranks.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is done; for heartbeats.

    Args:
        stage: `policy`, `reference`, `teacher`, several of them that are read in one pass (`reference and teacher`),
            or `train`.
        done, of: micro-batches of this rank in this stage.
    """

    stage: str
    done: int
    of: int


Report = Callable[[Progress], None]
ReadVersion = Callable[[int], Mapping[str, Tensor]]
"""The adapter tensors of an earlier version, by our names (`adapter.read_adapter`)."""


@dataclass(frozen=True, slots=True)
class BatchSignals:
    """Of this rank's samples, by index in the batch: what is known of each, or why it is left out."""

    streams: dict[int, Streams]
    dropped: dict[int, str]


def scores_by_sample(packed: Packed, reading: TokenScores) -> dict[int, Scores]:
    """A micro-batch's reading, apart by sample.

    Raises:
        StepDiverged: a number is not finite.
    """
    columns = {
        "logprob_T": reading.logprobs_N,
        "entropy_T": reading.entropies_N,
        "topk_logprobs_TK": reading.topk_logprobs_NK,
        "tail_T": reading.tails_N,
    }
    apart = {name: packed.split(values) for name, values in columns.items() if values is not None}
    return {member: Scores(**{name: parts[member] for name, parts in apart.items()}) for member in packed.members}


def ids_at_positions(packed: Packed, ids: Mapping[int, Tensor]) -> Tensor | None:
    """[N, K] of the ids of some members, each [T, K]; the positions of others get any ids. None if none has any."""
    known = {member: ids[member] for member in packed.members if member in ids}
    if not known:
        return None
    like = next(iter(known.values()))
    anything = torch.arange(like.shape[1], device=like.device)
    for member, length in zip(packed.members, packed.response_lengths, strict=True):
        known.setdefault(member, anything.expand(length, -1))
    return packed.join(known)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Runs one rank's part of the passes without gradient.

    Args:
        model: the policy as the step begins.
        parent: the version that is.
        read_version: how to get an earlier version's adapter, for hints to what it answered.
        ranks, report: as for the step.
    """

    model: PolicyModel
    parent: int
    read_version: ReadVersion | None
    ranks: Ranks
    report: Report

    @torch.no_grad()
    def read(
        self, asked: ScoringPass, packs: Sequence[Packed], at_ids: Mapping[int, Tensor]
    ) -> tuple[dict[int, Scores], dict[int, Tensor]]:
        """What a pass says of these micro-batches' members: scores, and the ids of the top-K scores among them.

        Args:
            at_ids: members → [T, K], ids to score them at; only if the pass does not ask for top-K ids itself.
        """
        scores: dict[int, Scores] = {}
        ids: dict[int, Tensor] = {}
        with self._as_version(asked.version):
            for done, pack in enumerate(packs, start=1):
                on_device = pack.to(self.model.device)
                ids_NK = ids_at_positions(on_device, at_ids)
                reading: TokenScores = self.model(on_device, at_ids_NK=ids_NK, top_k=asked.top_k)
                with self.ranks.raise_on_all_ranks():
                    scores |= scores_by_sample(on_device, reading)
                if reading.topk_ids_NK is not None:
                    ids |= on_device.split(reading.topk_ids_NK)
                self.report(Progress(asked.stage, done, len(packs)))
        return scores, ids

    @contextmanager
    def _as_version(self, version: int) -> Iterator[None]:
        """Inside, the model is this version."""
        if version == 0:
            with self.model.without_adapter():
                yield
        elif version == self.parent:
            yield
        else:
            if self.read_version is None:
                raise AdapterUnusable(f"version {version} is a teacher, but there is no way to read it")
            own = adapter_tensors(self.model)
            set_adapter(self.model, self.read_version(version))
            try:
                yield
            finally:
                set_adapter(self.model, own)


def gather_batch_signals(
    reader: Scorer, samples: Sequence[TrainingSample], share: RankShard, recipe: Train
) -> BatchSignals:
    """Run the passes and put what they say beside what was recorded.

    Raises:
        StepDiverged: a pass gives numbers that are not finite.
        AdapterUnusable: a teacher's version cannot be had.
    """
    policy: dict[int, Scores] = {}
    reference: dict[int, Scores] = {}
    teacher: dict[int, Scores] = {}
    teacher_ids: dict[int, Tensor] = {}
    of_student: dict[int, Tensor] = {}
    for asked, packs in share.before.items():
        scores, ids = reader.read(asked, packs, at_ids=of_student)
        if asked.policy:
            policy = scores
        if asked.reference:
            reference = scores
        if asked.hinted:
            teacher |= scores
            teacher_ids |= ids
        elif asked.top_k:
            of_student = {of_hint(index): ids_TK for index, ids_TK in ids.items()}
    found = BatchSignals({}, {})
    for index in (member for pack in share.packs for member in pack.members):
        sample = samples[index]
        try:
            streams = _streams(
                sample,
                reference.get(index),
                teacher.get(of_hint(index)),
                teacher_ids.get(of_hint(index)),
                reader.model.device,
            )
            if recipe.loss.correction == "decoupled":
                streams = replace(streams, prox_logprob_T=policy[index].logprob_T)
            streams = with_advantage(streams, sample.reward, recipe.advantage)
        except (StreamsUnusable, NothingToTrain) as error:
            found.dropped[index] = str(error)
            continue
        drift = _drift(policy[index], streams) if sample.explicit else 0.0
        if has_drifted(drift, bound=recipe.drift, explicit=sample.explicit):
            found.dropped[index] = f"drifted: mean |log ratio| {drift:.2f}, bound {recipe.drift:g}"
        elif not _teaches(streams, recipe):
            found.dropped[index] = "neither a verdict nor a hint that this recipe learns from"
        else:
            found.streams[index] = streams
    return found


def _streams(
    sample: TrainingSample,
    reference: Scores | None,
    teacher: Scores | None,
    topk_ids_TK: Tensor | None,
    device: torch.device,
) -> Streams:
    mask = sample.response_mask or [True] * len(sample.response_ids)
    streams = Streams(
        response_mask_T=torch.tensor(mask, dtype=torch.bool),
        behaviour_logprob_T=logprobs_T(sample.behaviour_logprobs, name="behaviour_logprob_T"),
    ).to(device)
    return replace(
        streams,
        reference_logprob_T=reference.logprob_T if reference else None,
        teacher_logprob_T=teacher.logprob_T if teacher else None,
        teacher_topk_ids_TK=topk_ids_TK if teacher else None,
        teacher_topk_logprobs_TK=teacher.topk_logprobs_TK if teacher else None,
        teacher_tail_T=teacher.tail_T if teacher else None,
    )


def _drift(policy: Scores, streams: Streams) -> float:
    assert streams.behaviour_logprob_T is not None
    gap_T = (policy.logprob_T - streams.behaviour_logprob_T).abs()
    return float(gap_T[streams.response_mask_T].mean())


def _teaches(streams: Streams, recipe: Train) -> bool:
    by_gradient = recipe.loss.policy_gradient > 0 and streams.advantage_T is not None
    return by_gradient or (recipe.loss.distillation > 0 and streams.teacher_topk_ids_TK is not None)
