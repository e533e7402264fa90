"""Several processes that take one step together, on FSDP2; or one process alone.

Knows nothing about samples or losses. What one rank finds wrong, all ranks raise: a rank that stopped alone
would leave the others waiting in a collective until their time-out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from clawloop.errors import (
    AdapterUnusable,
    ClawloopError,
    ModelUnsupported,
    NothingToTrain,
    StepDiverged,
    StreamsUnusable,
    TrainerUnavailable,
)
from clawloop.training.loading import build_model, fill_model
from clawloop.training.model import Lora, PolicyModel

Value = TypeVar("Value")
_SHARED = (StepDiverged, StreamsUnusable, NothingToTrain, AdapterUnusable, ModelUnsupported, TrainerUnavailable)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together.

    Args:
        rank: 0 writes and speaks for all.
        world: how many there are.
        group: over which they talk about more than tensors; torch's default group if None.
    """

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """From torch's default process group; alone if there is none."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is raised inside on one rank is raised on all; no collective may run inside.

        Of several errors, all ranks raise the lowest rank's.
        """
        problem: ClawloopError | None = None
        try:
            yield
        except _SHARED as error:
            if self.world == 1:
                raise
            problem = error
        if self.world == 1:
            return
        for found in self.gather(problem):
            if found is not None:
                raise found

    def first(self, value: Value) -> Value:
        """The first rank's value, on all; a collective."""
        if self.world == 1:
            return value
        values: list[Value] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in order of rank; a collective."""
        if self.world == 1:
            return [value]
        values: list[Value] = [value] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values


def load_sharded_model(
    checkpoint: Path,
    lora: Lora,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    gradient_checkpointing: bool = True,
    seed: int = 0,
) -> PolicyModel:
    """A model whose every tensor is divided among the ranks of the default group, layer by layer.

    The arguments are those of `loading.load_model`, and so are the numbers that come out.
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
