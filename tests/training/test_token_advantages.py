"""What a step tells of its tokens: the advantage of each that it trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clawloop.contracts.training import BatchSample, StepFigures
from clawloop.recipes.recipe import Advantage, Distillation, Loss, Train
from clawloop.training.model.decoder import TorchtuneModel
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.torchtune_loading import load_torchtune_model
from clawloop.training.packing.sequences import Limits
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
