"""A trainer's step in a process of its own, whose memory is read as each part of it comes to be.

    python -m benchmarks.plan_memory_trainer TINY_MODEL MODEL cpu|cuda [nf4]

Prints JSON: each part's bytes as planned and as measured. Started by `benchmarks.plan_memory`, with the environment
that the plan gives a trainer. On the CPU resident memory is read, on a GPU what torch has allocated there.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.plan_memory_engine import used_on_gpu
from clawloop.contracts.training import BatchSample
from clawloop.layout import trainer
from clawloop.layout.model_folder import read_model_shape
from clawloop.layout.model_shape import ModelShape
from clawloop.layout.on_cpu import TRAINER_RUNTIME
from clawloop.layout.request import LONGEST_CONTEXT_TOKENS, TrainingNeeds
from clawloop.recipes.recipe import Bounds, Optimiser, Train
from clawloop.training.model.families import Quantisation
from clawloop.training.model.loading import load_model
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.port import PolicyModel
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import Limits, TokenSequence
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import sample_id

_RECIPE = Train(bounds=Bounds(kl=1e9, ratio=1e9), optimiser=Optimiser(lr=1e-6))  # random weights diverge by themselves


@dataclass(frozen=True, slots=True)
class Workload:
    """Two micro-batches, so that the gradient of the first is there beside the second.

    Args:
        tokens: read in each.
        responses: response tokens of each sample.
        turns: samples of each, which share all of their prompts if there are several.
        budget: of a micro-batch.
    """

    tokens: int
    responses: int
    turns: int = 1
    budget: int = 1

    @property
    def longest(self) -> int:
        """Tokens read of one sample."""
        return self.tokens - (self.turns - 1) * (self.responses - 1)

    def samples(self, vocab: int) -> list[BatchSample]:
        generator = torch.Generator().manual_seed(1)

        def ids(count: int) -> list[int]:
            found: list[int] = torch.randint(0, vocab, (count,), generator=generator).tolist()
            return found

        made: list[BatchSample] = []
        for _ in range(2):
            prompt = ids(self.longest + 1 - self.responses)
            made += [
                BatchSample(
                    sample_id=sample_id(len(made) + turn),
                    prompt_ids=prompt,
                    response_ids=ids(self.responses),
                    logprobs=[-math.log(vocab)] * self.responses,
                    temperature=1.0,
                    version=0,
                    reward=1.0,
                )
                for turn in range(self.turns)
            ]
        return made


WORKLOADS = {
    "activations": Workload(tokens=1000, responses=4),
    "activations of a chat": Workload(tokens=900, responses=51, turns=7, budget=600),
    "logits": Workload(tokens=320, responses=300),
}
# As long as the plan lets a sample be, and what a GPU is for.
GPU_WORKLOADS = {
    "8,000 tokens": Workload(tokens=8000, responses=2000),
    "a chat of 8,000": Workload(tokens=8000, responses=501, turns=7, budget=6000),
    "32,000 tokens": Workload(tokens=32_000, responses=30_000),
}


class Resident:
    """Memory of this process."""

    def held(self) -> int:
        """Bytes in memory once all that was let go is given back."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return self._status("VmRSS")

    def clear_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return self._status("VmHWM")

    def _status(self, field: str) -> int:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


class Allocated:
    """Tensors of this process on the GPU."""

    def held(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    def clear_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer whose memory is measured, in bfloat16."""

    device: torch.device
    quantisation: Quantisation | None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def memory(self) -> Resident | Allocated:
        return Allocated() if self.on_gpu else Resident()

    @property
    def tokens(self) -> int:
        """Of the longest sample."""
        return LONGEST_CONTEXT_TOKENS if self.on_gpu else 8192

    @property
    def workloads(self) -> Mapping[str, Workload]:
        return GPU_WORKLOADS if self.on_gpu else WORKLOADS

    def planned(self, shape: ModelShape) -> dict[str, int]:
        """Bytes of each part."""
        needs, quantised = TrainingNeeds(), self.quantisation is not None
        found = {
            "runtime": trainer.CUDA_RUNTIME if self.on_gpu else TRAINER_RUNTIME,
            "base weights": trainer.base_bytes(shape, 2, self.tokens, quantised=quantised),
            "adapter and AdamW": trainer.adapter_bytes(shape, needs),
        }
        for name, workload in self.workloads.items():
            parts = trainer.working_bytes(
                shape,
                needs,
                2,
                tokens=workload.tokens,
                responses=workload.responses * workload.turns,
                longest=workload.responses,
                joined=workload.longest if workload.turns > 1 else 0,
            )
            found[name] = sum(parts) + (trainer.unpacked_bytes(shape, 2) if quantised else 0)
        if self.on_gpu:
            found["allocator"] = int(trainer.CUDA_SLACK * max(found[name] for name in self.workloads))
        return found

    def measured(self, tiny: Path, folder: Path) -> dict[str, int]:
        """Bytes of each part."""
        memory = self.memory
        before = used_on_gpu() if self.on_gpu else 0
        self._step(self._load(tiny), Workload(tokens=16, responses=4))
        imported = memory.held()
        model = self._load(folder)
        _read(model)
        loaded = memory.held()
        weights = sum(parameter.numel() * 4 for parameter in model.adapter_parameters().values())
        self._step(model, Workload(tokens=16, responses=4))  # compiles what these shapes need, which stays
        for parameter in model.adapter_parameters().values():
            parameter.grad = None
        compiled = memory.held()
        optimizer = make_optimizer(model, _RECIPE.optimiser)
        self._step(model, Workload(tokens=16, responses=4), optimizer)
        stepped = memory.held()
        found = {
            "base weights": loaded - imported - weights,
            "adapter and AdamW": stepped - compiled + weights,
        }
        for name, workload in self.workloads.items():
            self._step(model, workload, optimizer)
            held = memory.held()
            memory.clear_peak()
            self._step(model, workload, optimizer)
            found[name] = memory.peak() - held
        if not self.on_gpu:
            return found | {"runtime": imported + compiled - loaded + memory.held() - stepped}
        return found | {
            # Other programs on the GPU take no more meanwhile.
            "runtime": used_on_gpu() - before - torch.cuda.memory_reserved(),
            "allocator": torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated(),
        }

    def _load(self, folder: Path) -> PolicyModel:
        lora = LoraShape(rank=16, alpha=32.0)
        return load_model(
            folder,
            lora,
            dtype=torch.bfloat16,
            device=self.device,
            max_tokens=self.tokens,
            quantisation=self.quantisation,
        )

    def _step(self, model: PolicyModel, workload: Workload, optimizer: torch.optim.Optimizer | None = None) -> None:
        limits = Limits(workload.budget, self.tokens, model.vocab_size)
        samples: Sequence[BatchSample] = workload.samples(model.vocab_size)
        train_step(model, optimizer or make_optimizer(model, _RECIPE.optimiser), samples, _RECIPE, limits)


def main() -> None:
    torch.set_num_threads(2)
    tiny, folder = (Path(argument) for argument in sys.argv[1:3])
    found = Trainer(torch.device(sys.argv[3]), "nf4" if "nf4" in sys.argv[4:] else None)
    planned, measured = found.planned(read_model_shape(folder)), found.measured(tiny, folder)
    print(json.dumps({name: [planned[name], measured[name]] for name in planned}))


@torch.no_grad()
def _read(model: PolicyModel) -> None:
    """Touch all weights: on a CPU they are mapped, and loaded when they are read."""
    model(collate([TokenSequence("s", [1, 2, 3], [4], 1.0)], [0]).to(model.device))


if __name__ == "__main__":
    main()
