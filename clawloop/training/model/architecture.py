"""The decoder architecture in a Hugging Face checkpoint's `config.json`, and the names of its tensors.

Only what the trainer computes exactly is accepted: a config with anything else (RoPE scaling, sliding windows,
quantised weights) raises instead of being trained slightly wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from clawloop.errors import ModelUnsupported

SUPPORTED = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Architecture name in `config.json` → model type. Qwen2.5 checkpoints are named Qwen2ForCausalLM."""

_SUPPORTED_TEXT = "the trainer loads Qwen3ForCausalLM and Qwen2ForCausalLM (Qwen2.5)"


class Architecture(BaseModel):
    """The shape of a decoder, with the field names of Hugging Face's config."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["qwen2", "qwen3"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    tie_word_embeddings: bool = False

    @property
    def has_head_norm(self) -> bool:
        """True for Qwen3, which normalises each query and key head; Qwen2 has biases on q, k and v instead."""
        return self.model_type == "qwen3"


def read_architecture(checkpoint: Path) -> Architecture:
    """The architecture of the checkpoint in this directory.

    Raises:
        ModelUnsupported: there is no readable config, or it has something the trainer does not support.
    """
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{checkpoint} has no readable config.json: {error}") from error
    names = config.get("architectures") or []
    if len(names) != 1 or SUPPORTED.get(names[0]) != config.get("model_type"):
        raise ModelUnsupported(f"{checkpoint} is {' + '.join(names) or config.get('model_type')}; {_SUPPORTED_TEXT}")
    for what, found in _unsupported_features(config).items():
        raise ModelUnsupported(f"{checkpoint} uses {what} ({found}), which the trainer does not support")
    rope = config.get("rope_parameters") or {}
    fields = {**config, "rope_theta": config.get("rope_theta") or rope.get("rope_theta")}
    if fields.get("head_dim") is None and config["model_type"] == "qwen2":
        fields["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    try:
        return Architecture.model_validate(fields)
    except ValidationError as error:
        raise ModelUnsupported(f"{path} is incomplete: {error}") from error


def _unsupported_features(config: Mapping[str, object]) -> dict[str, object]:
    # transformers 4 writes `rope_scaling`, transformers 5 `rope_parameters`.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    assert isinstance(rope, dict)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    found: dict[str, object] = {}
    if rope_type != "default":
        found["RoPE scaling"] = rope_type
    if config.get("use_sliding_window"):
        found["sliding-window attention"] = config.get("sliding_window")
    if config.get("hidden_act", "silu") != "silu":
        found["another activation"] = config.get("hidden_act")
    if config.get("quantization_config"):
        found["quantised weights"] = config.get("quantization_config")
    if config.get("model_type") == "qwen3" and config.get("attention_bias"):
        found["attention biases in Qwen3"] = True
    return found


def base_names(architecture: Architecture) -> dict[str, str]:
    """Our name → the checkpoint's name, of every base tensor."""
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
    if not architecture.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(architecture.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        names[f"{ours}.sa_norm.scale"] = f"{theirs}.input_layernorm.weight"
        names[f"{ours}.mlp_norm.scale"] = f"{theirs}.post_attention_layernorm.weight"
        for our_module, their_module in projection_names(architecture, layer).items():
            names[f"{our_module}.weight"] = f"{their_module}.weight"
            projection = their_module.rsplit(".", 1)[-1]
            if architecture.model_type == "qwen2" and projection in ("q_proj", "k_proj", "v_proj"):
                names[f"{our_module}.bias"] = f"{their_module}.bias"
        if architecture.has_head_norm:
            for head in ("q", "k"):
                names[f"{ours}.attn.{head}_proj.norm.scale"] = f"{theirs}.self_attn.{head}_norm.weight"
    return names


def projection_names(architecture: Architecture, layer: int) -> dict[str, str]:
    """Our name → the checkpoint's name, of a layer's seven projections."""
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    inner = ".proj" if architecture.has_head_norm else ""
    return {
        f"{ours}.attn.q_proj{inner}": f"{theirs}.self_attn.q_proj",
        f"{ours}.attn.k_proj{inner}": f"{theirs}.self_attn.k_proj",
        f"{ours}.attn.v_proj": f"{theirs}.self_attn.v_proj",
        f"{ours}.attn.output_proj": f"{theirs}.self_attn.o_proj",
        f"{ours}.mlp.w1": f"{theirs}.mlp.gate_proj",
        f"{ours}.mlp.w3": f"{theirs}.mlp.up_proj",
        f"{ours}.mlp.w2": f"{theirs}.mlp.down_proj",
    }


def adapter_names(architecture: Architecture, targets: tuple[str, ...]) -> dict[str, str]:
    """Our name → the name in a PEFT adapter file, of every LoRA tensor."""
    names = {}
    for layer in range(architecture.num_hidden_layers):
        for ours, theirs in projection_names(architecture, layer).items():
            if theirs.rsplit(".", 1)[-1] in targets:
                names[f"{ours}.lora_a.weight"] = f"base_model.model.{theirs}.lora_A.weight"
                names[f"{ours}.lora_b.weight"] = f"base_model.model.{theirs}.lora_B.weight"
    return names
