"""Steps on the tiny model, as the step store returns them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import torch
from safetensors.torch import load_file

from clawloop.core.contracts.training import BatchSample, Pace, StepBatch, TrainedStep, VersionRef
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Lora, Loss, Optimiser, Recipe, Train
from clawloop.training.adapters.files import STATE_FILE
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape
from clawloop.training.setup import TrainerSetup
from tests.training.tiny import random_batch

RECIPE = Recipe(
    name="tiny",
    train=Train(
        batch_samples=9,
        staleness_versions=20,  # all samples are of version 0
        lora=Lora(rank=4, alpha=8.0),
        loss=Loss(kl=0.1),
        optimiser=Optimiser(lr=5e-3),
    ),
)


ROUNDED_GRADIENT = {"float32": 1e-3, "bfloat16": 0.15}
"""Most of `gradient_error` that is rounding; in bfloat16 0.10 was measured on a CPU. A step that misses a sample is
further off in float32, one that misses a rank's half in both (`test_a_wrong_gradient_is_seen`)."""


class Reported(list[str]):
    """Keeps what a step reports."""

    def __call__(self, status: str, pace: Pace | None = None) -> None:
        self.append(status)


def setup_of(base: Path, adapters: Path, **named: object) -> TrainerSetup:
    # A budget of 40 makes five micro-batches of nine samples: an odd number for two ranks.
    settings: dict[str, object] = {"device": "cpu", "micro_batch_tokens": 40, "threads": 1, "base_model": "tiny"}
    return TrainerSetup.model_validate({"model": base, "adapters": adapters, **settings, **named})


def samples_of(base: Path, n: int, *, hints: bool = True, version: int = 0) -> list[BatchSample]:
    """Nine samples of unequal length that depend on `n` only."""
    clean = load_model(base, LoraShape(4, 8.0), dtype=torch.float32, device=torch.device("cpu"))
    return [
        BatchSample(
            sample_id=SampleId(UUID(int=1000 * n + place)),
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            logprobs=sample.logprobs,
            temperature=sample.temperature,
            version=version,
            reward=sample.reward,
            hinted_prompts=sample.hinted_prompts,
        )
        for place, sample in enumerate(random_batch(clean, hints=hints, seed=n))
    ]


def step_of(
    samples: Sequence[BatchSample],
    n: int,
    parent: VersionRef | None = None,
    *,
    policy: str = "default",
    base_model: str = "tiny",
    recipe: Recipe = RECIPE,
    teachers: dict[int, VersionRef] | None = None,
) -> StepBatch:
    return StepBatch(
        policy=policy,
        base_model=base_model,
        n=n,
        parent=parent,
        epoch=0,
        recipe=recipe,
        samples=samples,
        teachers=teachers or {},
    )


def gradient_error(found: Path, expected: Path) -> float:
    """How far a step's gradient is from another's, relative to the other's norm, from the folders of the versions that
    both made of version 0: AdamW's first moment is then the gradient, clipped, times 1 − beta1."""
    one, other = (_first_moment(folder) for folder in (found, expected))
    return float((one - other).norm() / other.norm())


def _first_moment(folder: Path) -> torch.Tensor:
    state = load_file(folder / STATE_FILE)
    moments = [state[name].flatten().double() for name in sorted(state) if name.startswith("exp_avg/")]
    assert moments
    return torch.cat(moments)


def never() -> bool:
    return False


def completed(trained: TrainedStep | None) -> TrainedStep:
    assert trained is not None
    return trained
