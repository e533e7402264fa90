"""The teacher's gap: what the hint changes, read by the trainer alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clawloop.core.algorithms.streams import Streams
from clawloop.core.contracts.training import BatchSample
from clawloop.core.errors import ModelUnsupported
from clawloop.core.recipes.recipe import CONTROL, Train
from clawloop.training.batch import hinted_sequence, plain_sequence
from clawloop.training.model.checkpoint import end_tokens
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors, set_adapter
from clawloop.training.packing import Limits, TokenSequence, collate
from clawloop.training.ranks import Ranks, ignore_progress
from clawloop.training.scoring import Scorer, plan_scoring_passes, shard_batch
from clawloop.training.step import BatchSignals, gather_batch_signals
from tests.training.tiny import VOCAB, session_batch, shake_adapter

PARENT, OLDER = 3, 2
OPD = {"verdict_weight": 0.0}


def load(base: Path) -> PolicyModel:
    model = load_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    return model


def gather(
    model: PolicyModel, samples: Sequence[BatchSample], recipe: Train, ends: frozenset[int] = frozenset()
) -> BatchSignals:
    older = {name: 0.5 * tensor for name, tensor in adapter_tensors(model).items()}
    passes = plan_scoring_passes(samples, recipe, PARENT)
    shard = shard_batch(samples, Limits(200, 256, VOCAB), passes, rank=0, world_size=1)
    scorer = Scorer(model, PARENT, lambda _: older, Ranks(), ignore_progress)
    return gather_batch_signals(scorer, samples, shard, recipe, ends)


def signals(
    model: PolicyModel, samples: Sequence[BatchSample], recipe: Train, ends: frozenset[int] = frozenset()
) -> dict[int, Streams]:
    gathered = gather(model, samples, recipe, ends)
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


def test_a_token_that_only_the_control_finds_unlikely_drops_no_sample(qwen3: Path) -> None:
    model = load(qwen3)
    samples = [
        replace(sample, temperature=0.02, hinted_prompts={**sample.hinted_prompts, CONTROL: sample.prompt_ids[:1]})
        for sample in answered_by_three_versions(model)
    ]
    streams = signals(model, samples, Train.model_validate({"advantage": {**OPD, "control": True}}))
    teachers = [each.teacher_logprob_T for each in streams.values()]
    assert len(teachers) == len(samples)
    assert max(float(teacher.max()) for teacher in teachers if teacher is not None) == 0.0


CLIPPED = {"distillation": {"divergence": "clipped", "top_k": 4}, "loss": {"policy_gradient": 0.0, "distillation": 1.0}}


@pytest.mark.parametrize("settings", [{"advantage": OPD}, CLIPPED], ids=["sampled", "support"])
def test_end_tokens_are_kept_out_of_the_gap_wherever_they_stand(qwen3: Path, settings: dict[str, Any]) -> None:
    model = load(qwen3)
    samples = answered_by_three_versions(model)
    ends = frozenset(sample.response_ids[-1] for sample in samples)
    plain = Train.model_validate(settings)
    sparing = plain.model_copy(update={"distillation": plain.distillation.model_copy(update={"spare_end": True})})
    before, spared = (signals(model, samples, recipe, ends) for recipe in (plain, sparing))
    found = 0
    for index, sample in enumerate(samples):
        if settings is CLIPPED:
            ids, was, now = (
                before[index].teacher_topk_ids_TK,
                before[index].topk_advantage_TK,
                spared[index].topk_advantage_TK,
            )
        else:
            ids, was, now = torch.tensor(sample.response_ids), before[index].advantage_T, spared[index].advantage_T
        assert ids is not None
        assert was is not None
        assert now is not None
        at_end = torch.isin(ids, torch.tensor(sorted(ends)))
        found += int((was[at_end] != 0).sum())
        assert (now[at_end] == 0).all()
        assert torch.equal(now[~at_end], was[~at_end])
    assert found  # without the setting there is a gap


def _bounded(recipe: Train, bound: float) -> Train:
    return recipe.model_copy(update={"distillation": recipe.distillation.model_copy(update={"hint_distance": bound})})


def test_a_sample_whose_only_hint_is_too_far_is_left_out_or_learns_by_its_reward_alone(qwen3: Path) -> None:
    model = load(qwen3)
    samples = answered_by_three_versions(model)
    hints_alone = Train.model_validate(CLIPPED)
    uses = gather(model, samples, hints_alone).taught
    distances = {index: use.distance for index, (use,) in uses.items() if use.distance is not None}
    assert distances.keys() == {*range(len(samples))}
    bound = sorted(distances.values())[len(samples) // 2]
    far = {index for index, distance in distances.items() if distance > bound}
    assert far
    found = gather(model, samples, _bounded(hints_alone, bound))
    assert found.dropped.keys() == far
    for index in far:
        why = f"moves the whole reply, by {distances[index]:.2f} nats a token, bound {bound:g}"
        assert why in found.dropped[index]
    rewarded = Train.model_validate(CLIPPED | {"loss": {"policy_gradient": 1.0, "distillation": 1.0}})
    found = gather(model, samples, _bounded(rewarded, bound))
    assert not found.dropped
    for index, (use,) in found.taught.items():
        assert (use.share, use.distance) == (0.0 if index in far else 1.0, distances[index])
        assert (found.streams[index].topk_advantage_TK is None) == (index in far)


def test_of_two_hints_the_one_that_is_too_far_is_not_chosen(qwen3: Path) -> None:
    model = load(qwen3)
    # By one id a token the overlaps of two hints are often the same: then the first is chosen, whichever is nearer.
    recipe = Train.model_validate(CLIPPED | {"distillation": {"divergence": "clipped", "top_k": 1}})
    samples = [
        replace(sample, hinted_prompts={0: sample.prompt_ids[:1], 1: sample.hinted_prompts[0]})
        for sample in answered_by_three_versions(model)
    ]
    turned = 0
    for index, uses in gather(model, samples, recipe).taught.items():
        other, chosen = sorted(uses, key=lambda use: use.share)
        assert other.distance is not None
        assert chosen.distance is not None
        if other.distance < chosen.distance:
            recipe_within = _bounded(recipe, (other.distance + chosen.distance) / 2)
            within = gather(model, samples, recipe_within).taught[index]
            assert {use.place: use.share for use in within} == {other.place: 1.0, chosen.place: 0.0}
            turned += 1
    assert turned


def test_end_tokens_are_read_from_the_models_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="names no eos_token_id"):
        end_tokens(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert end_tokens(tmp_path) == {7, 9}
    added = [{"id": 3, "content": "<think>"}, {"id": 4, "content": "</think>"}, {"id": 5, "content": "<tool_call>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert end_tokens(tmp_path) == {4, 7, 9}
