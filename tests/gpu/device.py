"""The device of the tests in this folder: CUDA; with `GPU_TESTS_ON=cpu` the CPU, for those that need nothing else."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")

needs_device = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device here"
)
