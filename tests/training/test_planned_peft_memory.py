"""What the layout says a step's tensors take where transformers computes the model, beside torch's own record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clawloop.app.layout import memory
from clawloop.app.layout.model_folder import read_model_shape
from clawloop.app.layout.request import TrainingNeeds
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.test_memory import peak_bytes
from tests.training.test_planned_memory import RECIPES, samples

TOKENS, RESPONSES = 800, 11
COMMON = {"vocab_size": 512, "head_dim": 32, "max_position_embeddings": 8192}
SHAPES = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2},
    "wide": {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4},
}
WINDOW = 400
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 3},
    "Mistral": {"num_hidden_layers": 3, "sliding_window": WINDOW},
    "Gemma3": {
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}


def save_model(folder: Path, family: str, shape: str, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config(**COMMON, **SHAPES[shape], **FAMILIES[family]))
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(
    ("family", "shape", "dtype"),
    [
        ("Llama", "small", torch.bfloat16),
        ("Mistral", "small", torch.float32),
        pytest.param("Llama", "small", torch.float32, marks=pytest.mark.long),
        pytest.param("Mistral", "small", torch.bfloat16, marks=pytest.mark.long),
        *(
            pytest.param(family, "wide", dtype, marks=pytest.mark.long)
            for family in ("Llama", "Gemma3")
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
    ids=str,
)
def test_activations_are_what_was_planned(family: str, shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path, family, shape, dtype)
    model = load_model(
        folder, LoraShape(rank=16, alpha=32.0), dtype=dtype, device=torch.device("cpu"), backend="transformers"
    )
    recipe = RECIPES["plain"][0]
    optimizer, limits = make_optimizer(model, recipe.optimiser), Limits(1, 8192, 512, share_prefixes=False)
    batch = samples(512, [(TOKENS - RESPONSES + 1, RESPONSES), (TOKENS - 2 * RESPONSES, RESPONSES)])
    train_step(model, optimizer, batch, recipe, limits)
    gradient = sum(parameter.numel() * 4 for parameter in model.adapter_parameters().values())
    # The first step's gradient is let go and made again: the record counts that below zero.
    measured = peak_bytes(folder, lambda: train_step(model, optimizer, batch, recipe, limits)) + gradient
    planned = memory.working_bytes(
        read_model_shape(folder),
        TrainingNeeds(),
        dtype.itemsize,
        tokens=TOKENS,
        responses=RESPONSES,
        longest=RESPONSES,
        packed=False,
    )
    assert sum(planned) == pytest.approx(measured, rel=0.15)
