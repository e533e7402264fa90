"""Benchmarks of the trainer on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks.train import COMPARISONS
from benchmarks.train_figures import Cost, Found, result_of


def test_without_a_gpu_there_are_no_figures_and_the_program_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmarks.main(["train", "--gpu"]) == 1
    assert "--gpu: torch finds no CUDA device on this machine" in capsys.readouterr().err


def _found(samples: int, seconds: float) -> Found:
    costs = [Cost("clawloop", seconds, seconds, 2**30, 2**20), Cost("peft", 2 * seconds, seconds, 2**30, 2**21)]
    return Found(COMPARISONS["qwen3"], samples, samples * 100, costs, 0.0, {"clawloop, wall s": [seconds]}, flops=1e9)


def test_a_step_is_compared_with_others_and_by_the_samples_of_its_batch() -> None:
    result = result_of([_found(4, 1.0), _found(8, 2.0), _found(16, 6.0)], peak_flops=1e9)
    assert [(row["samples"], row["trainer"], row["tokens/s"]) for row in result.rows[:2]] == [
        (4, "clawloop", 400.0),
        (4, "peft", 200.0),
    ]
    assert result.rows[0]["MFU"] == 1.0
    title = COMPARISONS["qwen3"].title
    ratio = result.ratios[f"{title}, 8 samples: time, ours to peft"]
    assert (ratio.value, ratio.better) == (0.5, "lower")
    assert result.ratios[f"{title}, 8 samples: the step's memory, ours to peft"].value == 0.5
    growth = result.ratios[f"{title}, 16 samples to 4: time a token"]
    assert (growth.value, growth.reached, growth.enough) == (1.5, False, 1.0)
    assert result.raw[f"{title}, 16 samples: clawloop, wall s"] == [6.0]


def test_one_batch_size_says_nothing_of_its_growth() -> None:
    result = result_of([_found(4, 1.0)])
    assert [name for name in result.ratios if "to 4" in name] == []
    assert result.rows[0]["MFU"] is None
