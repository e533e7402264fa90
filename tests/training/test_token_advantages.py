"""What a step tells of its tokens: the advantage of each that it trained, and by how much it moved them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clawloop.core.contracts.training import BatchSample, StepFigures
from clawloop.core.recipes.recipe import Advantage, Distillation, Loss, Optimiser, Train
from clawloop.training.batch import plain_sequence
from clawloop.training.model.decoder import TorchtuneModel, load_torchtune_model
from clawloop.training.model.port import LoraShape
from clawloop.training.model.token_scores import TokenScores
from clawloop.training.packing import Limits, collate
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import VOCAB, random_batch, shake_adapter

LIMITS = Limits(budget_tokens=4096, max_tokens=256, vocab_size=VOCAB)


def load(path: Path) -> TorchtuneModel:
    model = load_torchtune_model(path, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    return model


def step(model: TorchtuneModel, samples: list[BatchSample], recipe: Train) -> StepFigures:
    return train_step(model, make_optimizer(model, recipe.optimiser), samples, recipe, LIMITS, parent=1)


def test_each_trained_tokens_advantage_is_told(qwen3: Path) -> None:
    model = load(qwen3)
    first, *others = random_batch(model)[:3]
    first = replace(first, response_ids=[*first.response_ids, 7], logprobs=[*first.logprobs, -1.0])
    masked = replace(first, response_mask=[False, True])
    report = step(model, [masked, *others], Train(advantage=Advantage(verdict_weight=0.5, teacher_weight=0.0)))
    told = report.advantages
    assert told[masked.sample_id] == [None, pytest.approx(0.5 * (masked.reward or 0))]
    for sample in others:
        assert told[sample.sample_id] == pytest.approx([0.5 * (sample.reward or 0)] * len(sample.response_ids))
    distilled = Train(
        advantage=Advantage(verdict_weight=0.0, teacher_weight=0.0),
        loss=Loss(policy_gradient=0.0, distillation=1.0, kl=0.0),
        distillation=Distillation(top_k=4),
    )
    assert step(load(qwen3), random_batch(model, hints=True)[1:2], distilled).advantages == {}


def logprobs(model: TorchtuneModel, sample: BatchSample) -> torch.Tensor:
    """Of the reply's tokens under the model's present weights, each document read by itself."""
    batch = collate({0: plain_sequence(sample)}, (0,))
    with torch.no_grad():
        scores: TokenScores = model(batch)
    return scores.logprobs_N


def test_by_how_much_a_step_moved_each_token_is_told_where_it_is_asked_for(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model)[:4]
    long = max(samples, key=lambda sample: len(sample.response_ids))
    mask = [False, *[True] * (len(long.response_ids) - 1)]
    samples = [replace(one, response_mask=mask) if one is long else one for one in samples]
    recipe = Train(token_moves=True, optimiser=Optimiser(lr=1e-3))
    before = [logprobs(model, sample) for sample in samples]
    report = step(model, samples, recipe)
    assert report.moves.keys() == {sample.sample_id for sample in samples}
    for sample, was in zip(samples, before, strict=True):
        moved = (logprobs(model, sample) - was).tolist()
        told = report.moves[sample.sample_id]
        masked = sample.response_mask is not None
        assert [value is None for value in told] == [masked and at == 0 for at in range(len(told))]
        assert [value for value in told if value is not None] == pytest.approx(moved[1 if masked else 0 :], abs=1e-5)
    assert max(abs(value) for told in report.moves.values() for value in told if value is not None) > 1e-3
    assert report.moves_seconds is not None
    assert report.moves_seconds > 0

    plain = step(load(qwen3), samples, recipe.model_copy(update={"token_moves": False}))
    assert (plain.moves, plain.moves_seconds) == ({}, None)
    assert plain.to_parent == report.to_parent
