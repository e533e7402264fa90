"""The teacher's gap: what the hint changes, read by the trainer alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clawloop.core.algorithms.streams import Streams
from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import Train
from clawloop.training.batch import hinted_sequence, plain_sequence
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors, set_adapter
from clawloop.training.packing import Limits, TokenSequence, collate
from clawloop.training.ranks import Ranks, ignore_progress
from clawloop.training.scoring import Scorer, plan_scoring_passes, shard_batch
from clawloop.training.step import gather_batch_signals
from tests.training.tiny import VOCAB, session_batch, shake_adapter

PARENT, OLDER = 3, 2
OPD = {"verdict_weight": 0.0}


def load(base: Path) -> PolicyModel:
    model = load_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    return model


def signals(model: PolicyModel, samples: Sequence[BatchSample], recipe: Train) -> dict[int, Streams]:
    older = {name: 0.5 * tensor for name, tensor in adapter_tensors(model).items()}
    passes = plan_scoring_passes(samples, recipe, PARENT)
    shard = shard_batch(samples, Limits(200, 256, VOCAB), passes, rank=0, world_size=1)
    scorer = Scorer(model, PARENT, lambda _: older, Ranks(), ignore_progress)
    gathered = gather_batch_signals(scorer, samples, shard, recipe)
    assert not gathered.dropped
    return gathered.streams


def answered_by_three_versions(model: PolicyModel) -> list[BatchSample]:
    return [replace(sample, version=(0, PARENT, OLDER)[index % 3]) for index, sample in enumerate(session_batch(model))]


def plain_logprobs(model: PolicyModel, sequence: TokenSequence, adapter: Mapping[str, Tensor] | None) -> Tensor:
    """One document alone, under these weights; the base model's for None."""
    current = adapter_tensors(model)
    if adapter is None:
        with model.without_adapter(), torch.no_grad():
            of_base: Tensor = model(collate([sequence], [0])).logprobs_N
            return of_base
    set_adapter(model, adapter)
    with torch.no_grad():
        found: Tensor = model(collate([sequence], [0])).logprobs_N
    set_adapter(model, current)
    return found


@pytest.mark.parametrize("teacher", ["policy", "base"])
def test_the_gap_is_the_teachers_log_prob_less_that_of_the_version_that_answered(qwen3: Path, teacher: str) -> None:
    model = load(qwen3)
    own = adapter_tensors(model)
    adapters = {0: None, PARENT: own, OLDER: {name: 0.5 * tensor for name, tensor in own.items()}}
    samples = answered_by_three_versions(model)
    recipe = Train.model_validate({"advantage": {**OPD, "teacher": teacher, "opd_clip": 100.0}})
    streams = signals(model, samples, recipe)
    assert len(streams) == len(samples)
    for index, sample in enumerate(samples):
        reads = None if teacher == "base" else adapters[sample.version]
        taught = plain_logprobs(model, hinted_sequence(sample), reads)
        answered = plain_logprobs(model, plain_sequence(sample), adapters[sample.version])
        advantage_T = streams[index].advantage_T
        assert advantage_T is not None
        assert (advantage_T - (taught - answered)).abs().max() < 1e-5
        assert advantage_T.abs().max() > 0.1


@pytest.mark.parametrize("teacher", ["policy", "base"])
def test_an_engines_rounding_does_not_reach_the_gap(qwen3: Path, teacher: str) -> None:
    model = load(qwen3)
    samples = answered_by_three_versions(model)
    recipe = Train.model_validate({"advantage": {**OPD, "teacher": teacher}})
    noise = torch.Generator().manual_seed(1)

    def rounded(sample: BatchSample) -> BatchSample:
        off = 0.2 * torch.randn(len(sample.logprobs), generator=noise)
        return replace(sample, logprobs=(torch.tensor(sample.logprobs) - off.abs()).tolist())

    exact, perturbed = (signals(model, batch, recipe) for batch in (samples, [rounded(sample) for sample in samples]))
    for index, streams in exact.items():
        other = perturbed[index]
        assert streams.advantage_T is not None
        assert other.advantage_T is not None
        assert torch.equal(streams.advantage_T, other.advantage_T)
        assert streams.behaviour_logprob_T is not None
        assert other.behaviour_logprob_T is not None
        assert not torch.equal(streams.behaviour_logprob_T, other.behaviour_logprob_T)
