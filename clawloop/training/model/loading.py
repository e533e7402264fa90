"""A policy model filled from a checkpoint, and its adapter set or made anew.

Knows nothing about adapter files or optimisers. Under FSDP each rank keeps its own part of every tensor.
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
from clawloop.training.model.decoder import Lora, PolicyModel


def build_model(
    checkpoint: Path,
    lora: Lora,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
) -> PolicyModel:
    """The model this checkpoint describes, without weights (on `meta`), to be sharded and filled.

    Args:
        checkpoint: Hugging Face directory.
        lora: where LoRA goes.
        dtype: float32 or bfloat16.
        max_tokens: longest document; None for all positions the checkpoint was made for.
        gradient_checkpointing: trade a second forward for memory.

    Raises:
        ModelUnsupported: another architecture, or a feature the trainer does not compute.
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
    """Read the base weights and begin a fresh adapter: A random, B zero, so that nothing changes yet.

    Raises:
        ModelUnsupported: tensors are missing, or their shapes disagree with the config.
    """
    ours_of = {theirs: ours for ours, theirs in base_names(model.architecture).items()}
    filled: dict[str, Tensor] = {}
    # One at a time: under FSDP a rank may have no room for the whole model.
    for theirs, tensor in BaseWeights(checkpoint).read(ours_of, device):
        ours = ours_of[theirs]
        cast = tensor.to(model.parameter_dtype(ours))
        filled[ours] = _like(model.get_parameter(ours), cast, f"{checkpoint}: {ours}")
    for ours, fresh in _fresh_adapter(model, seed).items():
        filled[ours] = sharded(model.get_parameter(ours), fresh.to(device))
    trainable = set(model.adapter_parameters())
    model.load_state_dict(filled, strict=True, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)  # `assign` made new parameters
    model.init_rope(device)


def load_model(
    checkpoint: Path,
    lora: Lora,
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
    """Put these whole tensors, by our name, in place of the adapter's.

    Raises:
        AdapterUnusable: names or shapes are not those of this model's adapter.
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
            parameter.copy_(sharded(parameter, tensor))


def reset_adapter(model: PolicyModel, seed: int) -> None:
    """A fresh adapter: A random, B zero, so that nothing changes yet."""
    set_adapter(model, _fresh_adapter(model, seed))


def adapter_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Copies of the adapter's whole tensors by our name, float32, on the CPU. Under FSDP a collective."""
    return {name: whole(p.detach()).to("cpu", copy=True) for name, p in model.adapter_parameters().items()}


def whole(tensor: Tensor) -> Tensor:
    """A tensor's full value; under FSDP a collective."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def _fresh_adapter(model: PolicyModel, seed: int) -> dict[str, Tensor]:
    # On the CPU and in order of name: the same for every device and number of ranks.
    generator = torch.Generator().manual_seed(seed)
    fresh = {}
    for name, parameter in model.adapter_parameters().items():
        if ".lora_a." in name:
            bound = 1 / math.sqrt(parameter.shape[1])  # as PEFT: Kaiming uniform with a = sqrt(5)
            fresh[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        else:
            fresh[name] = torch.zeros(parameter.shape)
    return fresh


def _like(parameter: Tensor, tensor: Tensor, what: str) -> Tensor:
    if parameter.shape != tensor.shape:
        raise ModelUnsupported(f"{what} is {list(tensor.shape)}, the config says {list(parameter.shape)}")
    return sharded(parameter, tensor)


def sharded(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as the parameter is; without FSDP the tensor itself."""
    if not isinstance(parameter, DTensor):
        return tensor
    # Every rank has read the whole tensor, so it keeps its part without asking rank 0 for it.
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
