"""Builds torchtune's decoder and fills it from a checkpoint.

Under FSDP each rank keeps its own shard of every tensor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from clawloop.errors import ModelUnsupported
from clawloop.training.model.adapter import reset_adapter, shard_like
from clawloop.training.model.architecture import base_names, read_architecture
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.decoder import TorchtuneModel
from clawloop.training.model.families import Quantisation
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.lora_linear import Float32LoraLinear, is_lora
from clawloop.training.model.nf4 import quantised


def build_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
) -> TorchtuneModel:
    """The model that this checkpoint describes, without weights (on `meta`), to be sharded and filled.

    Args:
        checkpoint: Hugging Face directory.
        lora: shape of the adapter.
        dtype: float32 or bfloat16.
        max_tokens: longest document; None: all positions of the checkpoint.
        gradient_checkpointing: recompute each layer in the backward pass to save memory.

    Raises:
        ModelUnsupported: an architecture or feature that the trainer does not support.
    """
    architecture = read_architecture(checkpoint)
    positions = architecture.max_position_embeddings
    with torch.device("meta"):
        return TorchtuneModel(
            architecture,
            lora,
            max_tokens=positions if max_tokens is None else min(max_tokens, positions),
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
        )


def fill_model(
    model: TorchtuneModel,
    checkpoint: Path,
    device: torch.device,
    *,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> None:
    """Reads the base weights and initialises a fresh adapter: A random, B zero, so that it changes nothing yet.

    Args:
        quantisation: of each projection as it is read, so that they are never all there whole.

    Raises:
        ModelUnsupported: tensors are missing, or their shapes disagree with the config.
    """
    ours_of = {theirs: ours for ours, theirs in base_names(model.architecture).items()}
    projections = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Float32LoraLinear)}
    filled: dict[str, Tensor] = {}
    # One tensor at a time: under FSDP the whole model may not fit on one rank.
    for theirs, tensor in BaseWeights(checkpoint).read(ours_of, device):
        ours = ours_of[theirs]
        cast = tensor.to(model.parameter_dtype(ours))
        shard = _checked_shard(model.get_parameter(ours), cast, f"{checkpoint}: {ours}")
        filled[ours] = quantised(shard) if quantisation is not None and ours in projections else shard
    for ours, parameter in model.named_parameters():
        if is_lora(ours):
            filled[ours] = shard_like(parameter, torch.zeros(parameter.shape, device=device))
    model.load_state_dict(filled, strict=True, assign=True)
    for ours, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(ours))  # `assign` made new parameters
    reset_adapter(model, seed)
    model.init_rope(device)


def load_torchtune_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> TorchtuneModel:
    """`build_model` and `fill_model`, for one process."""
    model = build_model(
        checkpoint, lora, dtype=dtype, max_tokens=max_tokens, gradient_checkpointing=gradient_checkpointing
    )
    fill_model(model, checkpoint, device, quantisation=quantisation, seed=seed)
    return model


def _checked_shard(parameter: Tensor, tensor: Tensor, what: str) -> Tensor:
    if parameter.shape != tensor.shape:
        raise ModelUnsupported(f"{what} is {list(tensor.shape)}, the config says {list(parameter.shape)}")
    return shard_like(parameter, tensor)
