"""Loads a model sharded over the ranks of a step, with FSDP2."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from clawloop.training.model.decoder import PolicyModel
from clawloop.training.model.loading import build_model, fill_model
from clawloop.training.model.lora import LoraShape


def load_sharded_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
    seed: int = 0,
) -> PolicyModel:
    """A model with every tensor sharded over the ranks of the default group, layer by layer.

    Arguments and numerical results are those of `loading.load_model`.
    """
    model = build_model(
        checkpoint, lora, dtype=dtype, max_tokens=max_tokens, gradient_checkpointing=gradient_checkpointing
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fill_model(model, checkpoint, device, seed=seed)
    return model
