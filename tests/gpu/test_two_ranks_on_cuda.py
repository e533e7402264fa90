"""Two ranks on a GPU each take the step of one process, whether they divide the base model or each hold it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clawloop.training.adapters.files import read_adapter
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.gpu.device import DEVICE
from tests.training.steps import ROUNDED_GRADIENT, completed, gradient_error, never, samples_of, setup_of, step_of
from tests.training.tiny import save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs here"
    ),
]


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_take_the_step_of_one_process(kind: str, dtype: str, tmp_path: Path) -> None:
    base, out = save_checkpoint(tmp_path / "base"), tmp_path / "together"
    out.mkdir()
    # --standalone takes a free port.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    step = ["-m", "tests.gpu.joined_step", str(base), str(out), DEVICE, kind, dtype]
    done = subprocess.run([*torchrun, *step], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((out / "step.json").read_text())
    alone = completed(
        StepRunner(setup_of(base, tmp_path / "alone")).train(step_of(samples_of(base, 1), 1), ignore_status, never)
    )
    # What bfloat16 moves a loss by.
    assert found["loss"] == pytest.approx(alone.figures.loss, abs=2e-2)
    assert found["grad_norm"] == pytest.approx(alone.figures.grad_norm, rel=ROUNDED_GRADIENT[dtype])
    assert gradient_error(out / found["path"], tmp_path / "alone" / alone.version.path) < ROUNDED_GRADIENT[dtype]
    tensors = read_adapter(out / found["path"]).tensors
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
