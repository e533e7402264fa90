"""The ranks that take one step together, or a single process: values exchanged, and errors raised on all ranks.

A rank that stopped alone would leave the others waiting in a collective until their time-out. This module does not
import models, which take seconds to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from clawloop.errors import (
    AdapterUnreadable,
    AdapterUnusable,
    ClawloopError,
    DiskFull,
    ModelUnsupported,
    NothingToTrain,
    RankOutOfMemory,
    StepDiverged,
    StreamsUnusable,
    TrainerUnavailable,
)
from clawloop.training.memory import is_out_of_memory

Value = TypeVar("Value")
_SHARED = (
    StepDiverged,
    StreamsUnusable,
    NothingToTrain,
    AdapterUnusable,
    AdapterUnreadable,
    DiskFull,
    ModelUnsupported,
    TrainerUnavailable,
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks that train together.

    Args:
        rank: 0 writes files and talks to Temporal.
        world_size: number of ranks.
        group: process group for Python objects; torch's default group if None.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of torch's default process group; a single rank if there is none."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def raise_on_all_ranks(self, enabled: bool = True) -> Iterator[None]:
        """Raises an error of one rank on all ranks when the block ends; no collective may run inside.

        Of several errors, all ranks raise the lowest rank's.

        Args:
            enabled: False where a collective may run inside: an error then ends its rank.

        Raises:
            RankOutOfMemory: on several ranks, for what a single process raises as torch's own error.
        """
        if self.world_size == 1 or not enabled:
            yield
            return
        own: ClawloopError | None = None
        try:
            yield
        except _SHARED as error:
            own = error
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            own = RankOutOfMemory(f"out of memory on rank {self.rank}")
        for raised in self.all_gather(own):
            if raised is not None:
                raise raised

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Gives every rank the sum of all ranks' gradients, bit for bit the same; a collective for tensors."""
        if self.world_size == 1:
            return
        gradients = [parameter.grad for parameter in parameters]
        assert all(gradient is not None for gradient in gradients)  # fillers have gradients of zero
        # One exchange instead of hundreds of small ones.
        flat = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            assert gradient is not None
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def broadcast(self, value: Value) -> Value:
        """The first rank's value, on all ranks; a collective."""
        if self.world_size == 1:
            return value
        values: list[Value] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def all_gather(self, value: Value) -> list[Value]:
        """Every rank's value, in order of rank, on all ranks; a collective."""
        if self.world_size == 1:
            return [value]
        values: list[Value] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values
