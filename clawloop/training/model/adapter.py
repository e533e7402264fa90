"""The adapter of a model in memory: set, reinitialised, read. By its tensors' names in a version's file.

Under FSDP each rank keeps its own shard of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from clawloop.errors import AdapterUnusable
from clawloop.training.model.port import PolicyModel


def set_adapter(model: PolicyModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies these unsharded tensors, by their names in its file, into the adapter.

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
    """Copies of the adapter's unsharded tensors by name, float32, on the CPU. Under FSDP a collective."""
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
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])  # as in PEFT: Kaiming uniform with a = sqrt(5)
            fresh[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        else:
            fresh[name] = torch.zeros(parameter.shape)
    return fresh


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor, sharded as the parameter is; without FSDP the tensor itself."""
    if not isinstance(parameter, DTensor):
        return tensor
    # Every rank has read the full tensor, so no rank needs to receive its shard from rank 0.
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
