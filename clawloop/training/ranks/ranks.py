"""Several processes that take one step together, or one process alone: what one rank finds wrong, all ranks raise.

A rank that stopped alone would leave the others waiting in a collective until their time-out. Knows nothing about
models, which take seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from clawloop.errors import (
    AdapterUnusable,
    ClawloopError,
    ModelUnsupported,
    NothingToTrain,
    StepDiverged,
    StreamsUnusable,
    TrainerUnavailable,
)

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
    def raise_on_all_ranks(self) -> Iterator[None]:
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
