"""A step whose memory runs out: smaller micro-batches, then without the longest sample, then an error with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from clawloop.contracts.training import BatchSample, StepFigures
from clawloop.errors import StepDiverged, TrainerFailed
from clawloop.training import step_runner
from clawloop.training.step import train_step
from clawloop.training.step_runner import StepRunner
from tests.training.steps import completed, never, samples_of, setup_of, step_of


def with_memory_for(tokens: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A device on which micro-batches over `tokens`, or samples over `longest`, do not fit: (samples, budget) tried."""
    tried: list[tuple[int, int]] = []

    def train(model: Any, optimizer: Any, samples: Sequence[BatchSample], *rest: Any, **named: Any) -> StepFigures:
        _, limits = rest
        tried.append((len(samples), limits.budget_tokens))
        lengths = [max(len(s.prompt_ids), len(s.hinted_prompt_ids or ())) + len(s.response_ids) for s in samples]
        if limits.budget_tokens > tokens or max(lengths) > longest:
            with torch.no_grad():  # as a step that failed after its first update
                for parameter in model.adapter_parameters().values():
                    parameter.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train_step(model, optimizer, samples, *rest, **named)

    monkeypatch.setattr(step_runner, "train_step", train)
    return tried


def test_micro_batches_are_halved_and_the_step_is_that_of_the_smaller_ones(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(qwen3, 1)
    small = completed(
        StepRunner(setup_of(qwen3, tmp_path / "small", micro_batch_tokens=10)).train(
            step_of(samples, 1), lambda _: None, never
        )
    )
    tried = with_memory_for(10, 100, monkeypatch)
    reported: list[str] = []
    runner = StepRunner(setup_of(qwen3, tmp_path / "halved"))
    halved = completed(runner.train(step_of(samples, 1), reported.append, never))
    assert tried == [(9, 40), (9, 20), (9, 10)]
    assert halved.version.sha256 == small.version.sha256
    assert not halved.figures.dropped
    assert "step 1: out of memory; again with micro-batches of 10 tokens" in reported


def test_a_sample_that_does_not_fit_alone_is_left_out_with_the_reason(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(qwen3, 1)
    with_memory_for(10, 50, monkeypatch)
    trained = completed(StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples, 1), lambda _: None, never))
    [(sample, why)] = trained.figures.dropped.items()
    [longest] = [s for s in samples if s.sample_id == sample]
    assert len(longest.prompt_ids) + len(longest.response_ids) == 51
    assert why == "out of memory: 51 tokens do not fit, not even alone"
    assert len(trained.figures.samples) == 8


def test_without_memory_for_most_samples_the_step_fails_with_a_remedy(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory_for(10, 1, monkeypatch)
    runner = StepRunner(setup_of(qwen3, tmp_path))
    with pytest.raises(TrainerFailed, match=r"5 of 9 samples do not fit alone; lower --micro-batch-tokens.*plan"):
        runner.train(step_of(samples_of(qwen3, 1), 1), lambda _: None, never)
    monkeypatch.undo()
    assert completed(runner.train(step_of(samples_of(qwen3, 1), 1), lambda _: None, never)).figures.samples


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), TrainerFailed),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), TrainerFailed),
        (RuntimeError("a bug"), RuntimeError),
        (StepDiverged("loss nan"), StepDiverged),
    ],
    ids=repr,
)
def test_a_model_that_does_not_fit_is_told_from_other_errors(
    error: Exception, expected: type[Exception], qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(step_runner, "load_model", load)
    with pytest.raises(expected) as raised:
        StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples_of(qwen3, 1), 1), lambda _: None, never)
    assert type(raised.value) is expected
