"""Loads a base model with a fresh adapter, by the backend of its family."""

from __future__ import annotations

from pathlib import Path

import torch

from clawloop.training.model.families import Backend, Quantisation, read_family
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.port import PolicyModel
from clawloop.training.model.torchtune_loading import load_torchtune_model


def load_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    backend: Backend | None = None,
    gradient_checkpointing: bool = True,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> PolicyModel:
    """The model of one process.

    Args:
        checkpoint: Hugging Face directory.
        lora: shape of the adapter.
        dtype: of base weights and arithmetic, float32 or bfloat16.
        max_tokens: longest document; None: all positions of the checkpoint.
        backend: see `read_family`.
        gradient_checkpointing: recompute each layer in the backward pass to save memory.
        quantisation: of the base model's projections; None: none.
        seed: of the fresh adapter.

    Raises:
        ModelUnsupported: an architecture, feature or file that no backend supports.
    """
    family = read_family(checkpoint, backend)
    if family.backend == "torchtune":
        return load_torchtune_model(
            checkpoint,
            lora,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            gradient_checkpointing=gradient_checkpointing,
            quantisation=quantisation,
            seed=seed,
        )
    # Takes seconds to import, and most trainers need no model of it.
    from clawloop.training.model.transformers_model import load_transformers_model

    return load_transformers_model(
        checkpoint,
        family,
        lora,
        dtype=dtype,
        device=device,
        max_tokens=max_tokens,
        gradient_checkpointing=gradient_checkpointing,
        quantisation=quantisation,
        seed=seed,
    )
