"""Families of models the trainer knows: which backend computes a checkpoint, and what its tensors are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from clawloop.errors import ModelUnsupported
from clawloop.training.model.architecture import read_architecture

Backend: TypeAlias = Literal["torchtune", "transformers"]
"""`torchtune`: its modules, documents packed, shared prefixes computed once. `transformers`: its models with PEFT's
LoRA, each document alone."""

Quantisation: TypeAlias = Literal["nf4"]
"""4-bit format of a base model's projections, see `clawloop.training.model.nf4`."""

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


def read_family(checkpoint: Path, backend: Backend | None = None) -> Family:
    """The family of the checkpoint in this directory.

    Args:
        backend: which shall compute it; None: torchtune for what it supports, else transformers.

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
        raise ModelUnsupported(
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
        backend = "torchtune" if _is_torchtunes(checkpoint) else "transformers"
    elif backend == "torchtune":
        read_architecture(checkpoint)
    return Family(model_type, backend, DECODER_PREFIX[model_type])


def _normalised(name: str) -> str:
    """`Gemma3ForConditionalGeneration` and `gemma3_text` → `gemma3`."""
    for ending in ("ForCausalLM", "ForConditionalGeneration", "_text"):
        name = name.removesuffix(ending)
    return name.replace("_", "").lower()


def _is_torchtunes(checkpoint: Path) -> bool:
    try:
        read_architecture(checkpoint)
    except ModelUnsupported:
        return False
    return True
