"""Scores of samples under one version of the policy: the forward passes without gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from clawloop.algorithms.scoring import Scores
from clawloop.errors import AdapterUnusable
from clawloop.training.model.adapter import adapter_tensors, set_adapter
from clawloop.training.model.port import PolicyModel
from clawloop.training.model.token_scores import TokenScores
from clawloop.training.packing.collate import MicroBatch
from clawloop.training.progress import Progress, ProgressCallback
from clawloop.training.ranks.collectives import Ranks
from clawloop.training.scoring_passes import ScoringPass

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
        self, scoring_pass: ScoringPass, micro_batches: Sequence[MicroBatch], at_ids: Mapping[int, Tensor]
    ) -> tuple[dict[int, Scores], dict[int, Tensor]]:
        """Scores of the members of these micro-batches, and the ids of the top-K scores in them.

        Args:
            at_ids: member → int64[T, K], ids to score it at; only if the pass does not itself find top-K ids.
        """
        scores: dict[int, Scores] = {}
        ids: dict[int, Tensor] = {}
        with nullcontext() if scoring_pass.made else self._as_version(scoring_pass.version):
            for done, micro_batch in enumerate(micro_batches, start=1):
                on_device = micro_batch.to(self.model.device)
                ids_NK = ids_at_positions(on_device, at_ids)
                # A sharded model's forward pass is a collective.
                with self.ranks.raise_on_all_ranks(not self.model.is_sharded):
                    token_scores: TokenScores = self.model(on_device, at_ids_NK=ids_NK, top_k=scoring_pass.top_k)
                    with self.ranks.raise_on_all_ranks(self.model.is_sharded):
                        scores |= scores_by_sample(on_device, token_scores)
                if token_scores.topk_ids_NK is not None:
                    ids |= on_device.split(token_scores.topk_ids_NK)
                self.on_progress(
                    Progress(scoring_pass.stage, done, len(micro_batches), tokens=micro_batch.tokens_S.numel())
                )
        return scores, ids

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
