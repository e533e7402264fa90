"""A step whose memory runs out: smaller micro-batches, then without the longest sample, then an error with a remedy.

Also where the process does not live to see it: the kernel killed it, or the ranks had to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from clawloop.core.contracts.training import BatchSample, Pace, StepFigures
from clawloop.core.errors import AdapterUnreadable, StepDiverged, StepTooLarge, TrainerFailed, TrainerUnavailable
from clawloop.training import step_runner
from clawloop.training import step_runner as step_runner_module
from clawloop.training.ranks import ignore_status
from clawloop.training.setup import TrainerSetup
from clawloop.training.step import train_step
from clawloop.training.step_runner import StepRunner
from tests.training.steps import Reported, completed, never, samples_of, setup_of, step_of


def with_memory_for(tokens: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A device on which micro-batches over `tokens`, or samples over `longest`, do not fit: (samples, budget) tried."""
    tried: list[tuple[int, int]] = []

    def train(model: Any, optimizer: Any, samples: Sequence[BatchSample], *rest: Any, **named: Any) -> StepFigures:
        _, limits = rest
        tried.append((len(samples), limits.budget_tokens))
        lengths = [max(map(len, [s.prompt_ids, *s.hinted_prompts.values()])) + len(s.response_ids) for s in samples]
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
            step_of(samples, 1), ignore_status, never
        )
    )
    tried = with_memory_for(10, 100, monkeypatch)
    reported = Reported()
    runner = StepRunner(setup_of(qwen3, tmp_path / "halved"))
    halved = completed(runner.train(step_of(samples, 1), reported, never))
    assert tried == [(9, 40), (9, 20), (9, 10)]
    assert halved.version.sha256 == small.version.sha256
    assert not halved.figures.dropped
    assert "step 1: out of memory; again with micro-batches of 10 tokens" in reported


def test_a_sample_that_does_not_fit_alone_is_left_out_with_the_reason(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(qwen3, 1)
    with_memory_for(10, 50, monkeypatch)
    trained = completed(StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples, 1), ignore_status, never))
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
        runner.train(step_of(samples_of(qwen3, 1), 1), ignore_status, never)
    monkeypatch.undo()
    assert completed(runner.train(step_of(samples_of(qwen3, 1), 1), ignore_status, never)).figures.samples


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
        StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples_of(qwen3, 1), 1), ignore_status, never)
    assert type(raised.value) is expected


class Killed(BaseException):
    """Ends an attempt as SIGKILL does: nothing of ours handles it."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that the kernel has killed for want of memory, as the last element."""
    kills = [3]
    monkeypatch.setattr(step_runner_module, "oom_kills", lambda: kills[-1])
    return kills


def end_in(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each step ends with this error: (samples, budget) tried."""
    tried: list[tuple[int, int]] = []

    def train(model: Any, optimizer: Any, samples: Sequence[BatchSample], *rest: Any, **_: Any) -> StepFigures:
        tried.append((len(samples), rest[1].budget_tokens))
        raise error

    monkeypatch.setattr(step_runner, "train_step", train)
    return tried


def be_killed(times: int, setup: TrainerSetup, samples: Sequence[BatchSample], kernel: list[int]) -> None:
    """Attempts at the first step, each ended by the kernel for want of memory."""
    for _ in range(times):
        with pytest.raises(Killed):
            StepRunner(setup).train(step_of(samples, 1), ignore_status, never)
        kernel.append(kernel[-1] + 1)


def test_after_the_kernel_killed_a_trainer_for_want_of_memory_the_next_takes_less(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: list[int]
) -> None:
    samples = samples_of(qwen3, 1)
    setup = setup_of(qwen3, tmp_path / "killed", micro_batch_tokens=120)
    with monkeypatch.context() as patch:
        tried = end_in(Killed(), patch)
        be_killed(2, setup, samples, kernel)
        assert tried == [(9, 120), (9, 60)]
    reported = Reported()
    found = completed(StepRunner(setup).train(step_of(samples, 1), reported, never))
    [said] = [line for line in reported if "kernel" in line]
    assert said.startswith(
        "step 1: the kernel killed the trainer or a rank, as it does when memory runs out; again with"
    )
    assert said.endswith("micro-batches of 30 tokens")
    small = setup_of(qwen3, tmp_path / "small", micro_batch_tokens=30)
    assert (
        found.version.sha256
        == completed(StepRunner(small).train(step_of(samples, 1), ignore_status, never)).version.sha256
    )
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["default"]
    # Forgotten with the step it was about.
    tried = with_memory_for(1000, 1000, monkeypatch)
    completed(StepRunner(setup).train(step_of(samples_of(qwen3, 2), 2, found.version), ignore_status, never))
    assert tried == [(9, 120)]


def test_samples_that_fill_a_micro_batch_alone_are_left_out_and_after_five_deaths_training_pauses(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: list[int]
) -> None:
    samples = samples_of(qwen3, 1)
    setup = setup_of(qwen3, tmp_path, micro_batch_tokens=60)
    tried = end_in(Killed(), monkeypatch)
    be_killed(5, setup, samples, kernel)
    # The longest has 51 tokens.
    assert tried == [(9, 60), (9, 30), (8, 30), (7, 30), (6, 30)]
    with pytest.raises(StepTooLarge, match=r"at 5 attempts, .* of 30 tokens at most; lower --micro-batch-tokens.*plan"):
        StepRunner(setup).train(step_of(samples, 1), ignore_status, never)
    # Another batch of the same number begins anew.
    with pytest.raises(Killed):
        StepRunner(setup).train(step_of(samples[1:], 1), ignore_status, never)
    assert tried[-1] == (8, 60)


@pytest.mark.parametrize(
    ("error", "kills"),
    [(Killed(), 3), (ValueError("a bug"), 4), (RuntimeError("a bug"), 4), (TrainerUnavailable("stopped"), 4)],
    ids=repr,
)
def test_an_attempt_that_ended_otherwise_is_repeated_as_it_was(
    error: BaseException,
    kills: int,
    qwen3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: list[int],
) -> None:
    tried = end_in(error, monkeypatch)
    for _ in range(2):
        with pytest.raises(type(error)):
            StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples_of(qwen3, 1), 1), ignore_status, never)
        kernel.append(kills)
    assert tried == [(9, 40), (9, 40)]


@pytest.mark.parametrize("disk_is_gone", [False, True])
def test_what_a_stopped_attempt_found_out_stays_true(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_is_gone: bool
) -> None:
    samples, stop = samples_of(qwen3, 1), False
    tried = with_memory_for(20, 100, monkeypatch)

    def note(status: str, pace: Pace | None = None) -> None:
        nonlocal stop
        stop = "micro-batch 1" in status
        if stop and disk_is_gone:
            raise AdapterUnreadable("the disk is gone")

    with pytest.raises(AdapterUnreadable if disk_is_gone else TrainerUnavailable, match=r"stopped|gone"):
        StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples, 1), note, lambda: stop)
    completed(StepRunner(setup_of(qwen3, tmp_path)).train(step_of(samples, 1), ignore_status, never))
    assert tried == [(9, 40), (9, 20), (9, 20)]


def test_the_kernels_count_is_read_where_it_is_written() -> None:
    found = step_runner_module.oom_kills()
    assert ("oom_kill" in Path("/proc/vmstat").read_text()) == (found is not None)


def test_a_killed_trainer_leaves_out_no_more_than_half_of_the_samples(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: list[int]
) -> None:
    samples = samples_of(qwen3, 1)[:3]
    setup = setup_of(qwen3, tmp_path, micro_batch_tokens=1)
    tried = end_in(Killed(), monkeypatch)
    be_killed(5, setup, samples, kernel)
    assert tried == [(3, 1), *[(2, 1)] * 4]
    with pytest.raises(StepTooLarge):
        StepRunner(setup).train(step_of(samples, 1), ignore_status, never)
