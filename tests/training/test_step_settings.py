"""Every setting of a recipe reaches its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.core.recipes.recipe import Train
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, adapter_tensors
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import VOCAB, random_batch, shake_adapter

LIMITS = Limits(budget_tokens=4096, max_tokens=256, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("advantage", "verdict_weight", 0.5),
        ("advantage", "teacher_weight", 0.5),
        ("advantage", "opd_clip", 0.1),
        ("advantage", "teacher", "base"),
        ("advantage", "spare_unlikely", 0.5),
        ("loss", "policy_gradient", 0.5),
        ("loss", "distillation", 0.5),
        ("loss", "kl", 0.5),
        ("loss", "entropy", 0.1),
        ("loss", "clip_low", 0.05),
        ("loss", "clip_high", 0.05),
        ("loss", "dual_clip", 1.29),
        ("loss", "correction", "decoupled"),
        ("loss", "aggregation", "sequence"),
        ("optimiser", "lr", 2e-3),
        ("optimiser", "beta1", 0.5),
        ("optimiser", "beta2", 0.5),
        ("optimiser", "epsilon", 1.0),
        ("optimiser", "weight_decay", 0.5),
        ("optimiser", "grad_clip", 0.01),
        ("optimiser", "epochs", 3),
        ("distillation", "top_k", 2),
        ("distillation", "top_k_of", "teacher"),
        ("distillation", "divergence", "forward"),
    ],
)
def test_every_setting_of_a_recipe_reaches_its_step(qwen3: Path, table: str, key: str, value: object) -> None:
    # Two epochs: AdamW's first update depends on neither beta, nor on how long the gradient is.
    plain: dict[str, dict[str, object]] = {"advantage": {}, "loss": {}, "optimiser": {"epochs": 2, "lr": 1e-3}}
    if table == "distillation":
        plain |= {"loss": {"distillation": 1.0}, table: {"top_k": 5}}
    changed = plain | {table: plain[table] | {key: value}}
    after = []
    for settings in (plain, plain, changed):
        model = load_model(qwen3, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
        shake_adapter(model)
        recipe = Train.model_validate(settings)
        batch = random_batch(model, hints=True)
        train_step(model, make_optimizer(model, recipe.optimiser), batch, recipe, LIMITS, parent=1)
        after.append(torch.cat([tensor.flatten() for tensor in adapter_tensors(model).values()]))
    assert torch.equal(after[0], after[1])
    assert (after[2] - after[0]).abs().max() > 1e-5
