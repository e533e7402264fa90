"""What a step knows about each of its tokens before it trains: the passes without gradient.

Knows nothing about losses. Up to three passes, each only if the recipe and the batch need it: the policy as
the step begins, the base model as reference, and the teacher, who reads the prompt with the hint in it.
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
from clawloop.recipe import Train
from clawloop.training.batch import Share, TrainingSample
from clawloop.training.collate import Packed
from clawloop.training.loading import adapter_tensors, set_adapter
from clawloop.training.model import PolicyModel, Reading
from clawloop.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is done; for heartbeats.

    Args:
        stage: `policy`, `reference`, `teacher` or `train`.
        done, of: micro-batches of this rank in this stage.
    """

    stage: str
    done: int
    of: int


Report = Callable[[Progress], None]
ReadVersion = Callable[[int], Mapping[str, Tensor]]
"""The adapter tensors of an earlier version, by our names (`adapter.read_adapter`)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of this rank's samples, by index in the batch: what is known of each, or why it is left out."""

    streams: dict[int, Streams]
    dropped: dict[int, str]


def scores_by_sample(packed: Packed, reading: Reading) -> dict[int, Scores]:
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


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward passes of one rank.

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
        self,
        stage: str,
        packs: Sequence[Packed],
        *,
        top_k: int | None = None,
        at_ids: Mapping[int, Tensor] | None = None,
    ) -> tuple[dict[int, Scores], dict[int, Tensor]]:
        """Scores, and the ids of top-K scores, of these micro-batches' samples."""
        scores: dict[int, Scores] = {}
        ids: dict[int, Tensor] = {}
        for done, pack in enumerate(packs, start=1):
            on_device = pack.to(self.model.device)
            ids_NK = on_device.join(at_ids) if at_ids and not pack.is_filler else None
            reading: Reading = self.model(on_device, at_ids_NK=ids_NK, top_k=top_k)
            with self.ranks.together():
                scores |= scores_by_sample(on_device, reading)
            if reading.topk_ids_NK is not None:
                ids |= on_device.split(reading.topk_ids_NK)
            self.report(Progress(stage, done, len(packs)))
        return scores, ids

    @contextmanager
    def as_version(self, version: int) -> Iterator[None]:
        """Inside, the model is this version."""
        if version == self.parent:
            yield
        elif version == 0:
            with self.model.without_adapter():
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


def gather_evidence(passes: Passes, samples: Sequence[TrainingSample], share: Share, recipe: Train) -> Evidence:
    """Run the passes and put what they say beside what was recorded.

    Raises:
        StepDiverged: a pass gives numbers that are not finite.
        AdapterUnusable: a teacher's version cannot be had.
    """
    compares = recipe.loss.distillation > 0 and bool(share.hinted_packs)
    top_k = recipe.distillation.top_k if compares else None
    of_student = top_k if recipe.distillation.top_k_of == "student" else None
    decoupled = recipe.loss.correction == "decoupled"
    policy: dict[int, Scores] = {}
    policy_ids: dict[int, Tensor] = {}
    if decoupled or of_student or any(sample.explicit for sample in samples):
        policy, policy_ids = passes.read("policy", share.packs, top_k=of_student)
    reference: dict[int, Scores] = {}
    if recipe.loss.kl > 0:
        with passes.model.without_adapter():
            reference, _ = passes.read("reference", share.packs)
    teacher: dict[int, Scores] = {}
    teacher_ids: dict[int, Tensor] = {}
    for version, packs in share.hinted_packs.items():
        with passes.as_version(version):
            scores, ids = passes.read("teacher", packs, top_k=None if of_student else top_k, at_ids=policy_ids)
        teacher |= scores
        teacher_ids |= ids
    found = Evidence({}, {})
    for index in (member for pack in share.packs for member in pack.members):
        sample = samples[index]
        try:
            streams = _streams(
                sample, reference.get(index), teacher.get(index), teacher_ids.get(index), passes.model.device
            )
            if decoupled:
                streams = replace(streams, prox_logprob_T=policy[index].logprob_T)
            streams = with_advantage(
                streams,
                sample.reward,
                verdict_weight=recipe.advantage.verdict_weight,
                teacher_weight=recipe.advantage.teacher_weight,
                gap_clip=recipe.advantage.opd_clip,
            )
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
