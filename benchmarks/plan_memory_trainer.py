"""A trainer's step in a process of its own, whose memory is read as each part of it comes to be.

    python -m benchmarks.plan_memory_trainer TINY_MODEL MODEL

Prints JSON: each part's bytes as planned and as measured. Started by `benchmarks.plan_memory`, with the environment
that the plan gives a trainer.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from clawloop.contracts.training import BatchSample
from clawloop.layout import trainer
from clawloop.layout.model_folder import read_model_shape
from clawloop.layout.on_cpu import TRAINER_RUNTIME
from clawloop.layout.request import TrainingNeeds
from clawloop.recipes.recipe import Bounds, Optimiser, Train
from clawloop.training.model.loading import load_model
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.port import PolicyModel
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import Limits, TokenSequence
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import sample_id

_TOKENS = 8192
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


def main() -> None:
    torch.set_num_threads(2)
    tiny, folder = (Path(argument) for argument in sys.argv[1:3])
    measured = _measure(tiny, folder)
    shape, needs = read_model_shape(folder), TrainingNeeds()
    planned = {
        "runtime": TRAINER_RUNTIME,
        "base weights": trainer.base_bytes(shape, 2, _TOKENS),
        "adapter and AdamW": trainer.adapter_bytes(shape, needs),
    }
    for name, workload in WORKLOADS.items():
        planned[name] = sum(
            trainer.working_bytes(
                shape,
                needs,
                2,
                tokens=workload.tokens,
                responses=workload.responses * workload.turns,
                longest=workload.responses,
                joined=workload.longest if workload.turns > 1 else 0,
            )
        )
    print(json.dumps({name: [planned[name], measured[name]] for name in planned}))


def _measure(tiny: Path, folder: Path) -> dict[str, int]:
    _step(_load(tiny), Workload(tokens=16, responses=4))
    imported = _resident()
    model = _load(folder)
    _read(model)
    loaded = _resident()
    weights = sum(parameter.numel() * 4 for parameter in model.adapter_parameters().values())
    _step(model, Workload(tokens=16, responses=4))  # compiles what these shapes need, which stays
    for parameter in model.adapter_parameters().values():
        parameter.grad = None
    compiled = _resident()
    optimizer = make_optimizer(model, _RECIPE.optimiser)
    _step(model, Workload(tokens=16, responses=4), optimizer)
    stepped = _resident()
    found = {
        "base weights": loaded - imported - weights,
        "adapter and AdamW": stepped - compiled + weights,
    }
    for name, workload in WORKLOADS.items():
        _step(model, workload, optimizer)
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        _step(model, workload, optimizer)
        found[name] = _status("VmHWM") - before
    return found | {"runtime": imported + compiled - loaded + _resident() - stepped}


def _load(folder: Path) -> PolicyModel:
    lora = LoraShape(rank=16, alpha=32.0)
    return load_model(folder, lora, dtype=torch.bfloat16, device=torch.device("cpu"), max_tokens=_TOKENS)


@torch.no_grad()
def _read(model: PolicyModel) -> None:
    """Touch all weights: on a CPU they are mapped, and loaded when they are read."""
    model(collate([TokenSequence("s", [1, 2, 3], [4], 1.0)], [0]))


def _step(model: PolicyModel, workload: Workload, optimizer: torch.optim.Optimizer | None = None) -> None:
    limits = Limits(workload.budget, _TOKENS, model.vocab_size)
    samples: Sequence[BatchSample] = workload.samples(model.vocab_size)
    train_step(model, optimizer or make_optimizer(model, _RECIPE.optimiser), samples, _RECIPE, limits)


def _resident() -> int:
    """Bytes in memory once all that was let go is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
