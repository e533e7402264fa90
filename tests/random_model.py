"""Model folders of a real model's exact shape with random weights: complete enough to be served and trained.

The tokenizer is the tiny model's, so most ids of the vocabulary are never written; what they cost is there all the
same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from clawloop.app.local.tiny_model import ensure_tiny_model

QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
"""Of Qwen3-0.6B, whose embeddings are tied."""
QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
"""Of Qwen3-4B, whose embeddings are tied too."""

QWEN3_27M = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
"""Qwen3's architecture, 27 million parameters."""


def write_random_model(folder: Path, shape: dict[str, int] = QWEN3_06B, device: str = "cpu") -> Path:
    """A Qwen3 of this shape in bfloat16, in a new folder; 1.2 GB and ten seconds for the default.

    Args:
        device: that draws the weights; each kind of device draws others.
    """
    folder.mkdir(parents=True)
    tiny = ensure_tiny_model(folder.parent)
    for path in tiny.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **shape, "dtype": "bfloat16"}))
    save_file(_weights(shape, device), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(shape: dict[str, int], device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def matrix(outputs: int, inputs: int) -> Tensor:
        drawn = torch.randn(outputs, inputs, generator=generator, device=device)
        return drawn.mul_(inputs**-0.5).to("cpu", torch.bfloat16)

    width, inner = shape["hidden_size"], shape["intermediate_size"]
    query = shape["num_attention_heads"] * shape["head_dim"]
    key = shape["num_key_value_heads"] * shape["head_dim"]
    weights = {"model.embed_tokens.weight": matrix(shape["vocab_size"], width), "model.norm.weight": _ones(width)}
    for layer in range(shape["num_hidden_layers"]):
        matrices = {
            "self_attn.q_proj": (query, width),
            "self_attn.k_proj": (key, width),
            "self_attn.v_proj": (key, width),
            "self_attn.o_proj": (width, query),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        norms = {
            "input_layernorm": width,
            "post_attention_layernorm": width,
            "self_attn.q_norm": shape["head_dim"],
            "self_attn.k_norm": shape["head_dim"],
        }
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": matrix(*sizes) for name, sizes in matrices.items()}
        weights |= {f"{prefix}.{name}.weight": _ones(size) for name, size in norms.items()}
    return weights


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
