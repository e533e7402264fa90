"""Benchmarks of the trainer on a machine without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks import low_precision, train_step


@pytest.mark.parametrize("main", [train_step.main, low_precision.main], ids=["train", "low-precision"])
def test_without_a_gpu_there_are_no_figures_and_the_program_fails(
    main: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--gpu"])
    with pytest.raises(SystemExit, match="--gpu: torch finds no CUDA device on this machine"):
        main()
