"""Benchmarks of the trainer on a machine without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import train_step


def test_without_a_gpu_there_are_no_figures_and_the_program_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--gpu"])
    with pytest.raises(SystemExit, match="--gpu: torch finds no CUDA device on this machine"):
        train_step.main()
    assert benchmarks.main(["low-precision", "--gpu"]) == 1
    assert "--gpu: torch finds no CUDA device on this machine" in capsys.readouterr().err
