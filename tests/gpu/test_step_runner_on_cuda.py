"""A resident trainer's steps on a GPU, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.training.adapters.files import read_adapter
from clawloop.training.model.architecture import read_architecture
from clawloop.training.step_runner import StepRunner
from tests.training.steps import never, quiet, samples_of, setup_of, step_of, whole
from tests.training.tiny import save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def test_a_resident_trainer_takes_steps_in_bfloat16_and_resumes_them(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    batches = {n: samples_of(base, n) for n in (1, 2)}
    on_gpu = StepRunner(setup_of(base, tmp_path / "cuda", device="cuda"))
    first = whole(on_gpu.train(step_of(batches[1], 1), quiet, never))
    second = whole(on_gpu.train(step_of(batches[2], 2, first.version), quiet, never))
    on_cpu = StepRunner(setup_of(base, tmp_path / "cpu"))
    alone = whole(on_cpu.train(step_of(batches[1], 1), quiet, never))
    # What bfloat16 moves a loss by.
    assert first.figures.loss == pytest.approx(alone.figures.loss, abs=2e-2)
    tensors = read_adapter(tmp_path / "cuda" / second.version.path, read_architecture(base)).tensors
    assert all(bool(tensor.isfinite().all()) and tensor.dtype is torch.float32 for tensor in tensors.values())
    # Another process goes on from the files.
    resumed = StepRunner(setup_of(base, tmp_path / "cuda", device="cuda"))
    again = whole(resumed.train(step_of(batches[2], 2, first.version), quiet, never))
    assert again.figures.loss == pytest.approx(second.figures.loss, abs=1e-3)
