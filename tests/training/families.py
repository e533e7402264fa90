"""Tiny random models of each family, as transformers writes them; norms look trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.training.tiny import VOCAB

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_GEMMA: dict[str, Any] = {
    **_SHAPE,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA4: dict[str, Any] = {
    **_GEMMA,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": False,
}
_QWEN35: dict[str, Any] = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True)
class TinyFamily:
    """How one family is made.

    Args:
        make: a random model; those of a decoder alone take changes of its config.
        prefix: what the decoder's tensors in an adapter begin with, after PEFT's own.
        adapted: how many projections have an adapter.
    """

    make: Callable[..., PreTrainedModel]
    adapted: int
    prefix: str = "model.layers."


def _made(config: str, model: str, **shape: Any) -> Callable[..., PreTrainedModel]:
    def make(**changes: Any) -> PreTrainedModel:
        return getattr(transformers, model)(getattr(transformers, config)(**{**shape, **changes}))

    return make


def _wrapped_gemma3() -> PreTrainedModel:
    vision = {**_VISION, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=_GEMMA, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def _wrapped_gemma4() -> PreTrainedModel:
    vision = {**_VISION, "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8}
    config = transformers.Gemma4Config(text_config=_GEMMA4, vision_config=vision, audio_config=None)
    return transformers.Gemma4ForConditionalGeneration(config)


def _wrapped_qwen35() -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
    config = transformers.Qwen3_5Config(text_config=_QWEN35, vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(config)


_WRAPPED = "model.language_model.layers."

FAMILIES: dict[str, TinyFamily] = {
    "qwen2": TinyFamily(_made("Qwen2Config", "Qwen2ForCausalLM", **_SHAPE), 21),
    "qwen3": TinyFamily(_made("Qwen3Config", "Qwen3ForCausalLM", **_SHAPE), 21),
    "llama": TinyFamily(_made("LlamaConfig", "LlamaForCausalLM", **_SHAPE, tie_word_embeddings=False), 21),
    "mistral": TinyFamily(_made("MistralConfig", "MistralForCausalLM", **_SHAPE, sliding_window=16), 21),
    "gemma3_text": TinyFamily(_made("Gemma3TextConfig", "Gemma3ForCausalLM", **_GEMMA), 21),
    "gemma3": TinyFamily(_wrapped_gemma3, 21, _WRAPPED),
    # Half of the layers have no keys and values of their own.
    "gemma4_text": TinyFamily(_made("Gemma4TextConfig", "Gemma4ForCausalLM", **_GEMMA4), 24),
    "gemma4": TinyFamily(_wrapped_gemma4, 24, _WRAPPED),
    # One layer of four has attention with keys and values.
    "qwen3_5_text": TinyFamily(_made("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **_QWEN35), 16),
    "qwen3_5": TinyFamily(_wrapped_qwen35, 16, _WRAPPED),
    # Attention alone; of Qwen2's mixture the shared expert too.
    "mixtral": TinyFamily(
        _made("MixtralConfig", "MixtralForCausalLM", **_SHAPE, num_local_experts=4, num_experts_per_tok=2), 12
    ),
    "qwen2_moe": TinyFamily(
        _made(
            "Qwen2MoeConfig",
            "Qwen2MoeForCausalLM",
            **_SHAPE,
            **_MIXTURE,
            num_experts=4,
            shared_expert_intermediate_size=32,
        ),
        21,
    ),
    "qwen3_moe": TinyFamily(_made("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_SHAPE, **_MIXTURE, num_experts=4), 12),
    "qwen3_5_moe_text": TinyFamily(
        _made(
            "Qwen3_5MoeTextConfig",
            "Qwen3_5MoeForCausalLM",
            **_QWEN35,
            **_MIXTURE,
            num_experts=4,
            shared_expert_intermediate_size=32,
        ),
        16,
    ),
}


def save_family(path: Path, family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of this family; a model that also sees has a tower too.

    Args:
        changes: of the config, for a decoder alone.
    """
    torch.manual_seed(seed)
    model = FAMILIES[family].make(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.mul_(3)
    model.to(dtype).save_pretrained(path)
    return path
