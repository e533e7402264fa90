"""Both backends on a GPU: bfloat16 beside float32, a quantised base, a document of 32k tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.recipes.recipe import Loss
from clawloop.training.model.families import Backend
from clawloop.training.model.loading import load_model
from clawloop.training.model.lora import LoraShape
from clawloop.training.packing.collate import collate
from clawloop.training.progress import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.training.steps import RECIPE, completed, never, samples_of, setup_of, step_of
from tests.training.tiny import random_sequences, save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    pytest.mark.parametrize("backend", ["torchtune", "transformers"]),
]

DEVICE = "cuda"


def test_bfloat16_log_probs_are_near_those_of_float32(backend: Backend, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(base, LoraShape(4, 8.0), dtype=dtype, device=torch.device(DEVICE), backend=backend)
        packed = collate(random_sequences([(40, 30)]), [0]).to(model.device)
        with torch.no_grad():
            found.append(model(packed).logprobs_N)
    assert float((found[0] - found[1]).abs().mean()) < 0.15


def test_a_quantised_base_takes_a_step_and_resumes(backend: Backend, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    loss = Loss(kl=0.1, correction="decoupled")
    recipe = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"loss": loss})})
    setup = setup_of(base, tmp_path, device=DEVICE, backend=backend, quantise="nf4")
    first = completed(StepRunner(setup).train(step_of(samples_of(base, 1), 1, recipe=recipe), ignore_status, never))
    batch = step_of(samples_of(base, 2), 2, first.version, recipe=recipe)
    second = completed(StepRunner(setup).train(batch, ignore_status, never))
    assert len(second.figures.samples) == 9


def test_a_document_of_32k_tokens_has_a_gradient(backend: Backend, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", dtype=torch.bfloat16, positions=32_768)
    model = load_model(base, LoraShape(4, 8.0), dtype=torch.bfloat16, device=torch.device(DEVICE), backend=backend)
    packed = collate(random_sequences([(32_000, 500)]), [0]).to(model.device)
    model(packed).logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.adapter_parameters().values()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
