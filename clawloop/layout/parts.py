"""A layout: which process is where, and what each part of its memory is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

GIB = 2**30
MIB = 2**20
Ranks = Literal["replicated", "sharded"]


class Role(StrEnum):
    ENGINE = "engine"
    JUDGE = "judge engine"
    TRAINER = "trainer"
    SERVICE = "service"
    """Gateway, workers, databases: no model in it."""


class PartName(StrEnum):
    """A purpose that memory is used for."""

    WEIGHTS = "base weights"
    LORA = "LoRA slots"
    KV = "KV cache"
    READING = "reading and sampling"
    """Buffers of an engine's forward pass and its sampler."""
    GRAPHS = "CUDA graphs"
    RUNTIME = "runtime"
    """Imports, CUDA's context, workspaces, buffers between GPUs."""
    ADAPTER = "adapter and AdamW"
    """LoRA weights, their gradient, both of AdamW's moments."""
    GATHERED = "gathered weights"
    """The whole weights of a layer, which FSDP gathers while the layer is computed."""
    UNPACKED = "unpacked weights"
    """The unpacked copy of a 4-bit base model's projection, and the temporary tensors of unpacking it."""
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    """Logits of one chunk of positions, less the memory of the layer that they reuse."""
    SLACK = "allocator"
    """Memory that torch's allocator holds but cannot use (fragmentation)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory on each device of a process.

    Args:
        how: in numbers, what it was computed from.
    """

    name: PartName
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Process:
    """One process, or one that is made of several (an engine with tensor parallelism, a trainer's ranks).

    Args:
        name: e.g. `engine 0`, `trainer`.
        gpus: indices of the GPUs it is on, one for each of its ranks; none on a machine without.
        parts: memory on each of them.
        why: why it is there and not elsewhere, in one sentence.
        arguments: what follows from the layout for its command line.
        environment: variables it is started with.
        cached_tokens: an engine's.
    """

    name: str
    role: Role
    gpus: tuple[int, ...]
    parts: tuple[Part, ...]
    why: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cached_tokens: int = 0

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return sum(part.bytes for part in self.parts)

    def part(self, name: PartName) -> int:
        return sum(part.bytes for part in self.parts if part.name is name)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the machine's memory where there is none.

    Args:
        name: e.g. `GPU 0`, `memory`.
        bytes: all of it.
        kept_free: of that, what no process is given.
    """

    name: str
    bytes: int
    kept_free: int

    @property
    def usable(self) -> int:
        return self.bytes - self.kept_free


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of an installation and the devices they run on.

    Args:
        kind: whether processes are on GPUs or in the machine's memory.
        devices: in the order of their indices.
        ranks: how the trainer's ranks hold the base model: whole each, or divided among them; None for one rank, or
            none.
        max_model_len: tokens of a context.
        notes: what a person should know, a sentence each.
        version_bytes: of each adapter version on disk; 0 where nothing is trained.
    """

    kind: Literal["cuda", "cpu"]
    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    ranks: Ranks | None
    max_model_len: int
    notes: tuple[str, ...]
    version_bytes: int = 0

    def on(self, device: int) -> tuple[Process, ...]:
        """The processes on this device."""
        if self.kind == "cpu":
            return self.processes
        return tuple(process for process in self.processes if device in process.gpus)

    def used(self, device: int) -> int:
        return sum(process.bytes for process in self.on(device))


def gibibytes(count: int) -> str:
    """E.g. `7.5 GiB`, `0.04 GiB`."""
    size = count / GIB
    return f"{size:.1f} GiB" if size >= 0.1 or count == 0 else f"{size:.2f} GiB"
