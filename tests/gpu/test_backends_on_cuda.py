"""Both backends on a GPU: bfloat16 beside float64, a quantised base, a document of 32k tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from clawloop.core.recipes.recipe import Loss
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel
from clawloop.training.options import Backend
from clawloop.training.packing import TokenSequence, collate
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.gpu.device import DEVICE, needs_device
from tests.training.steps import RECIPE, completed, never, samples_of, setup_of, step_of
from tests.training.tiny import random_sequences, reference_model, save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    needs_device,
    pytest.mark.parametrize("backend", ["torchtune", "transformers"]),
]


def logprobs_of(model: PolicyModel, sequences: list[TokenSequence]) -> Tensor:
    with torch.no_grad():
        packed = collate(sequences, range(len(sequences)), share_prefixes=False).to(model.device)
        return model(packed).logprobs_N.double().cpu()


def plain_logprobs(base: Path, dtype: torch.dtype, device: str, sequences: list[TokenSequence]) -> Tensor:
    """As transformers computes them."""
    model, found = reference_model(base, dtype).to(device), []
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]], device=device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1].double()
        chosen = torch.tensor(sequence.response_ids, device=device)[:, None]
        found.append((logits / sequence.temperature).log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
    return torch.cat(found)


def test_log_probs_are_as_near_to_float64_as_rounding_lets_them(backend: Backend, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    sequences = random_sequences([(40, 60), (9, 80), (70, 60)])
    exact = plain_logprobs(base, torch.float64, "cpu", sequences)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(base, LoraShape(4, 8.0), dtype=dtype, device=torch.device(DEVICE), backend=backend)
        off = (logprobs_of(model, sequences) - exact).abs()
        # What the same rounding does to transformers' own forward pass on this device.
        rounding = (plain_logprobs(base, dtype, DEVICE, sequences) - exact).abs()
        assert off.mean() < 1.2 * rounding.mean() + 1e-6
        assert off.max() < 2 * rounding.max() + 1e-5


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
