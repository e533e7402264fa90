"""Model folders for tests: real headers, weights of zeros."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, tuple[int, ...]]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def attention(prefix: str, *, width: int = 8, query: int = 16, key: int = 8) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (query, width),
        f"{prefix}.self_attn.k_proj.weight": (key, width),
        f"{prefix}.self_attn.v_proj.weight": (key, width),
        f"{prefix}.self_attn.o_proj.weight": (width, query),
    }


def mlp(prefix: str, *, width: int = 8, inner: int = 16) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, width),
        f"{prefix}.up_proj.weight": (inner, width),
        f"{prefix}.down_proj.weight": (width, inner),
    }


PHI3 = {**QWEN3, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


def phi3_tensors() -> dict[str, tuple[int, ...]]:
    """As Phi-3 has them: q, k and v are one matrix, and gate and up are."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 8)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.self_attn.qkv_proj.weight": (32, 8), f"{prefix}.self_attn.o_proj.weight": (8, 16)}
        tensors |= {f"{prefix}.mlp.gate_up_proj.weight": (32, 8), f"{prefix}.mlp.down_proj.weight": (8, 16)}
    return tensors


def qwen3_tensors() -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= attention(prefix) | mlp(f"{prefix}.mlp") | {f"{prefix}.self_attn.q_norm.weight": (4,)}
    return tensors


def write_folder(
    folder: Path, config: Mapping[str, object] = QWEN3, tensors: Shapes | None = None, *, dtype: str = "float16"
) -> Path:
    """A complete model folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}{% if enable_thinking %}<think>{% endif %}")
    shapes = qwen3_tensors() if tensors is None else tensors
    save_file({name: np.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder
