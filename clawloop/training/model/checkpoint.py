"""A Hugging Face checkpoint: its architecture, its family and its end tokens, from its JSON files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from clawloop.core.errors import FamilyUnknown, ModelUnsupported
from clawloop.core.families.template import CLOSES_THINKING
from clawloop.training.options import Backend

# Architecture ---------------------------------------------------------------------------------------------------------
# The decoder architecture in a Hugging Face checkpoint's `config.json`, and the names of its tensors.
#
# Only what the packed decoder computes exactly is accepted: a config with anything else (RoPE scaling but Llama 3's,
# documents longer than a sliding window, quantised weights) raises instead of being trained slightly wrong.

SUPPORTED = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
"""Architecture name in `config.json` → model type. Qwen2.5 checkpoints are named Qwen2ForCausalLM."""

_SUPPORTED_TEXT = "documents are packed for Qwen3, Qwen2 (and 2.5), Llama and Mistral"


class Llama3Rope(BaseModel):
    """The scaling of RoPE's frequencies in Llama 3.1 to 3.3, with the field names of Hugging Face's config."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class Architecture(BaseModel):
    """The shape of a decoder, with the field names of Hugging Face's config."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"]
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
    llama3_rope: Llama3Rope | None = None
    tie_word_embeddings: bool = False

    @property
    def has_head_norm(self) -> bool:
        """True for Qwen3, which normalises each query and key head."""
        return self.model_type == "qwen3"

    @property
    def has_qkv_bias(self) -> bool:
        """True for Qwen2, whose q, k and v have biases."""
        return self.model_type == "qwen2"


def read_architecture(checkpoint: Path, max_tokens: int | None = None) -> Architecture:
    """The architecture of the checkpoint in this directory.

    Args:
        max_tokens: of the longest document; None: all positions of the checkpoint.

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
    for what, found in _unsupported_features(config, max_tokens).items():
        raise ModelUnsupported(f"{checkpoint} uses {what} ({found}), with which documents are not packed")
    rope = _rope(config)
    fields = {**config, "rope_theta": config.get("rope_theta") or rope.get("rope_theta")}
    fields["llama3_rope"] = rope if _rope_type(rope) == "llama3" else None
    try:
        if fields.get("head_dim") is None and config["model_type"] != "qwen3":
            fields["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        return Architecture.model_validate(fields)
    except (ValidationError, LookupError, TypeError) as error:
        raise ModelUnsupported(f"{path} is incomplete: {error}") from error


def _rope(config: Mapping[str, object]) -> Mapping[str, object]:
    # transformers 4 writes `rope_scaling`, transformers 5 `rope_parameters`.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    assert isinstance(rope, dict)
    return rope


def _rope_type(rope: Mapping[str, object]) -> object:
    return rope.get("rope_type") or rope.get("type") or "default"


def _unsupported_features(config: Mapping[str, object], max_tokens: int | None) -> dict[str, object]:
    rope, model_type = _rope(config), config.get("model_type")
    found: dict[str, object] = {}
    if _rope_type(rope) not in ("default", "llama3"):
        found["RoPE scaling"] = _rope_type(rope)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        found["a rotation of some of each head"] = rope
    # Qwen2 and Qwen3 name a window that they do not use.
    window = config.get("sliding_window") if config.get("use_sliding_window", model_type == "mistral") else None
    longest = [tokens for tokens in (max_tokens, config.get("max_position_embeddings")) if isinstance(tokens, int)]
    if isinstance(window, int) and window < min(longest, default=window + 1):
        found["sliding-window attention"] = f"{window} tokens"
    if config.get("hidden_act", "silu") != "silu":
        found["another activation"] = config.get("hidden_act")
    if config.get("quantization_config"):
        found["quantised weights"] = config.get("quantization_config")
    if model_type != "qwen2" and config.get("attention_bias"):
        found["attention biases"] = True
    if config.get("mlp_bias"):
        found["biases of the MLP"] = True
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
            if architecture.has_qkv_bias and projection in ("q_proj", "k_proj", "v_proj"):
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


# Families -------------------------------------------------------------------------------------------------------------
# Families of models the trainer knows: which backend computes a checkpoint, and what its tensors are called.

_TEXT = "model."
_WRAPPED = "model.language_model."
"""Prefix of the decoder's names in checkpoints and adapters of multimodal models."""
_FORMERLY_WRAPPED = "language_model.model."
"""The same, as older releases of transformers wrote it; engines know it in checkpoints and not in adapters."""

DECODER_PREFIX: Mapping[str, str] = {
    "qwen2": _TEXT,
    "qwen3": _TEXT,
    "llama": _TEXT,
    "mistral": _TEXT,
    "gemma3_text": _TEXT,
    "gemma3": _WRAPPED,
    "gemma4_text": _TEXT,
    "gemma4": _WRAPPED,
    "qwen3_5_text": _TEXT,
    "qwen3_5": _WRAPPED,
    # Mixtures of experts.
    "mixtral": _TEXT,
    "qwen2_moe": _TEXT,
    "qwen3_moe": _TEXT,
    "qwen3_5_moe_text": _TEXT,
    "qwen3_5_moe": _WRAPPED,
}
"""`model_type` of `config.json` → what the names of the decoder's tensors begin with, in adapters that engines take."""


@dataclass(frozen=True, slots=True)
class Family:
    """The trainer's handling of one model type.

    Args:
        model_type: as in `config.json`.
        backend: library that computes it.
        decoder_prefix: see `DECODER_PREFIX`.
    """

    model_type: str
    backend: Backend
    decoder_prefix: str

    def checkpoint_names(self, module: str) -> tuple[str, ...]:
        """The names that a module's weight may have in the checkpoint, by its name in an adapter's file."""
        names = [f"{module}.weight"]
        if self.decoder_prefix == _WRAPPED and module.startswith(_WRAPPED):
            names.append(f"{_FORMERLY_WRAPPED}{module.removeprefix(_WRAPPED)}.weight")
        return tuple(names)


def read_family(checkpoint: Path, backend: Backend | None = None, max_tokens: int | None = None) -> Family:
    """The family of the checkpoint in this directory.

    Args:
        backend: which shall compute it; None: torchtune for what it supports, else transformers.
        max_tokens: of the longest document; None: all positions of the checkpoint.

    Raises:
        ModelUnsupported: no readable config, an unknown family, quantised weights, or a backend that cannot compute it.
    """
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{checkpoint} has no readable config.json: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or model_type not in DECODER_PREFIX:
        raise FamilyUnknown(
            f"{checkpoint} is of the family {model_type!r}; the trainer knows {', '.join(sorted(DECODER_PREFIX))}"
        )
    architectures = config.get("architectures") or []
    if [_normalised(name) for name in architectures] != [_normalised(model_type)]:
        named = " + ".join(architectures) or "of no architecture"
        raise ModelUnsupported(f"{checkpoint} is {named}, no text generator of its family {model_type}")
    if config.get("quantization_config"):
        raise ModelUnsupported(
            f"{checkpoint} has quantised weights, which are served and not trained: give the unquantised model "
            "(`--quantise nf4` keeps it in 4 bits), and this one to `--serve-model`"
        )
    if backend is None:
        backend = "torchtune" if packs_documents(checkpoint, max_tokens) else "transformers"
    elif backend == "torchtune":
        read_architecture(checkpoint, max_tokens)
    return Family(model_type, backend, DECODER_PREFIX[model_type])


def end_tokens(checkpoint: Path) -> frozenset[int]:
    """Ids of the tokens that end a turn, and of those that end thinking.

    Raises:
        ModelUnsupported: the checkpoint names no token that ends a turn.
    """
    named: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        ids = _json_of(checkpoint / file).get("eos_token_id")
        named |= {each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)}
    if not named:
        raise ModelUnsupported(f"{checkpoint} names no eos_token_id in generation_config.json or config.json")
    added = _json_of(checkpoint / "tokenizer.json").get("added_tokens") or []
    return frozenset(named) | {token["id"] for token in added if token.get("content") in CLOSES_THINKING}


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _normalised(name: str) -> str:
    """`Gemma3ForConditionalGeneration` and `gemma3_text` → `gemma3`."""
    for ending in ("ForCausalLM", "ForConditionalGeneration", "_text"):
        name = name.removesuffix(ending)
    return name.replace("_", "").lower()


def packs_documents(checkpoint: Path, max_tokens: int | None = None) -> bool:
    """True if the trainer packs this checkpoint's documents, and computes shared prefixes once: `read_architecture`."""
    try:
        read_architecture(checkpoint, max_tokens)
    except ModelUnsupported:
        return False
    return True
