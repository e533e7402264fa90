"""Fills a policy model from a checkpoint, and sets or reinitialises its adapter.

Under FSDP each rank keeps its own shard of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from clawloop.errors import AdapterUnusable, ModelUnsupported
from clawloop.training.model.architecture import base_names, read_architecture
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.decoder import PolicyModel
from clawloop.training.model.lora import LoraShape


def build_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
) -> PolicyModel:
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
        return PolicyModel(
            architecture,
            lora,
            max_tokens=positions if max_tokens is None else min(max_tokens, positions),
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
        )


def fill_model(model: PolicyModel, checkpoint: Path, device: torch.device, *, seed: int = 0) -> None:
    """Reads the base weights and initialises a fresh adapter: A random, B zero, so that it changes nothing yet.

    Raises:
        ModelUnsupported: tensors are missing, or their shapes disagree with the config.
    """
    ours_of = {theirs: ours for ours, theirs in base_names(model.architecture).items()}
    filled: dict[str, Tensor] = {}
    # One tensor at a time: under FSDP the whole model may not fit on one rank.
    for theirs, tensor in BaseWeights(checkpoint).read(ours_of, device):
        ours = ours_of[theirs]
        cast = tensor.to(model.parameter_dtype(ours))
        filled[ours] = _checked_shard(model.get_parameter(ours), cast, f"{checkpoint}: {ours}")
    for ours, fresh in _fresh_adapter(model, seed).items():
        filled[ours] = shard_like(model.get_parameter(ours), fresh.to(device))
    trainable = set(model.adapter_parameters())
    model.load_state_dict(filled, strict=True, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)  # `assign` made new parameters
    model.init_rope(device)


def load_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
    seed: int = 0,
) -> PolicyModel:
    """`build_model` and `fill_model`, for one process."""
    model = build_model(
        checkpoint, lora, dtype=dtype, max_tokens=max_tokens, gradient_checkpointing=gradient_checkpointing
    )
    fill_model(model, checkpoint, device, seed=seed)
    return model


def set_adapter(model: PolicyModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies these unsharded tensors, by our names, into the adapter.

    Raises:
        AdapterUnusable: names or shapes differ from those of this model's adapter.
    """
    parameters = model.adapter_parameters()
    if parameters.keys() != tensors.keys():
        different = sorted(parameters.keys() ^ tensors.keys())
        raise AdapterUnusable(f"{len(different)} tensors differ in name, the first is {different[0]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = tensors[name].to(parameter.device, torch.float32)
            if parameter.shape != tensor.shape:
                raise AdapterUnusable(f"{name}: {list(tensor.shape)} instead of {list(parameter.shape)}")
            parameter.copy_(shard_like(parameter, tensor))


def reset_adapter(model: PolicyModel, seed: int) -> None:
    """Reinitialises the adapter: A random, B zero, so that it changes nothing yet."""
    set_adapter(model, _fresh_adapter(model, seed))


def adapter_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Copies of the adapter's unsharded tensors by our names, float32, on the CPU. Under FSDP a collective."""
    return {name: full_tensor(p.detach()).to("cpu", copy=True) for name, p in model.adapter_parameters().items()}


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor; under FSDP a collective."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def _fresh_adapter(model: PolicyModel, seed: int) -> dict[str, Tensor]:
    # On the CPU and sorted by name, so the same for every device and number of ranks.
    generator = torch.Generator().manual_seed(seed)
    fresh = {}
    for name, parameter in model.adapter_parameters().items():
        if ".lora_a." in name:
            bound = 1 / math.sqrt(parameter.shape[1])  # as in PEFT: Kaiming uniform with a = sqrt(5)
            fresh[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        else:
            fresh[name] = torch.zeros(parameter.shape)
    return fresh


def _checked_shard(parameter: Tensor, tensor: Tensor, what: str) -> Tensor:
    if parameter.shape != tensor.shape:
        raise ModelUnsupported(f"{what} is {list(tensor.shape)}, the config says {list(parameter.shape)}")
    return shard_like(parameter, tensor)


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor, sharded as the parameter is; without FSDP the tensor itself."""
    if not isinstance(parameter, DTensor):
        return tensor
    # Every rank has read the full tensor, so no rank needs to receive its shard from rank 0.
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
