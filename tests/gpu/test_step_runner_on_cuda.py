"""Steps on a GPU, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.training.adapters.files import read_adapter
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.gpu.device import DEVICE, needs_device
from tests.training.steps import ROUNDED_GRADIENT, completed, gradient_error, never, samples_of, setup_of, step_of
from tests.training.tiny import save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    needs_device,
]


def test_a_step_runner_trains_in_bfloat16_and_resumes(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    batches = {n: samples_of(base, n) for n in (1, 2)}
    on_gpu = StepRunner(setup_of(base, tmp_path / "cuda", device=DEVICE))
    first = completed(on_gpu.train(step_of(batches[1], 1), ignore_status, never))
    second = completed(on_gpu.train(step_of(batches[2], 2, first.version), ignore_status, never))
    on_cpu = StepRunner(setup_of(base, tmp_path / "cpu"))
    alone = completed(on_cpu.train(step_of(batches[1], 1), ignore_status, never))
    # What bfloat16 moves a loss by.
    assert first.figures.loss == pytest.approx(alone.figures.loss, abs=2e-2)
    for dtype, most in ROUNDED_GRADIENT.items():
        runner = StepRunner(setup_of(base, tmp_path / dtype, device=DEVICE, dtype=dtype))
        made = completed(runner.train(step_of(batches[1], 1), ignore_status, never))
        assert made.figures.grad_norm == pytest.approx(alone.figures.grad_norm, rel=most)
        folders = tmp_path / dtype / made.version.path, tmp_path / "cpu" / alone.version.path
        assert gradient_error(*folders) < most
    tensors = read_adapter(tmp_path / "cuda" / second.version.path).tensors
    assert all(bool(tensor.isfinite().all()) and tensor.dtype is torch.float32 for tensor in tensors.values())
    # Another process goes on from the files.
    resumed = StepRunner(setup_of(base, tmp_path / "cuda", device=DEVICE))
    again = completed(resumed.train(step_of(batches[2], 2, first.version), ignore_status, never))
    assert again.figures.loss == pytest.approx(second.figures.loss, abs=1e-3)
