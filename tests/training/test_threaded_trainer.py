"""The trainer's thread: steps that are cancelled, that hang, that break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from clawloop.contracts.training import BatchSample, StepBatch, TrainedStep
from clawloop.errors import TrainerUnavailable
from clawloop.training.step_runner import StepRunner
from clawloop.training.trainer import ThreadedTrainer
from tests.training.steps import never, quiet, samples_of, setup_of, step_of, whole


@pytest.fixture(scope="module")
def samples(qwen3: Path) -> list[BatchSample]:
    return samples_of(qwen3, 1)


async def test_a_cancelled_step_ends_at_the_next_micro_batch_and_the_next_one_is_unharmed(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path / "a")))
    said: list[str] = []
    go_on = threading.Event()

    def report(at: str) -> None:
        said.append(at)
        if at == "step 1: train 2 of 5":
            go_on.wait(20)

    working = asyncio.create_task(trainer.train(step_of(samples, 1), report))
    while said[-1:] != ["step 1: train 2 of 5"]:
        await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert said[-1] == "step 1: train 2 of 5"
    assert not list((tmp_path / "a" / "default").glob("*"))
    done = await trainer.train(step_of(samples, 1), quiet)
    wanted = whole(StepRunner(setup_of(qwen3, tmp_path / "b")).train(step_of(samples, 1), quiet, never))
    assert done.version == wanted.version
    await trainer.close()


class HangingModel(StepRunner):
    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.go_on = threading.Event()

    def train(self, step: StepBatch, say: Callable[[str], None], should_stop: Callable[[], bool]) -> TrainedStep | None:
        say("step 1: begins")
        self.go_on.wait(20)
        raise TrainerUnavailable("it went on")


async def test_a_step_that_hangs_is_given_up_and_the_process_must_be_started_anew(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path
) -> None:
    model = HangingModel(setup_of(qwen3, tmp_path))
    trainer = ThreadedTrainer(model, stall_limit=timedelta(seconds=0.5))
    with pytest.raises(TrainerUnavailable, match="nothing was heard of the step"):
        await trainer.train(step_of(samples, 1), quiet)
    assert trainer.broken.is_set()
    with pytest.raises(TrainerUnavailable, match="started anew"):
        await trainer.train(step_of(samples, 1), quiet)
    model.go_on.set()
    await trainer.close()


async def test_a_bug_in_one_step_leaves_the_trainer_in_order(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr("clawloop.training.step_runner.train_step", lambda *given, **named: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await trainer.train(step_of(samples, 1), quiet)
    assert not trainer.broken.is_set()
    assert (await trainer.train(step_of(samples, 1), quiet)).version.n == 1
    await trainer.close()


async def test_a_gpu_that_failed_needs_a_new_process(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path)))

    def illegal(*given: object, **named: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("clawloop.training.step_runner.train_step", illegal)
    with pytest.raises(TrainerUnavailable, match="the GPU failed"):
        await trainer.train(step_of(samples, 1), quiet)
    assert trainer.broken.is_set()
    await trainer.close()


async def test_no_room_on_the_disk_is_nothing_that_lasts(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path)))

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(TrainerUnavailable, match="version 1 cannot be written: No space left on device"):
            await trainer.train(step_of(samples, 1), quiet)
    assert not list((tmp_path / "default").iterdir())
    assert (await trainer.train(step_of(samples, 1), quiet)).version.n == 1
    await trainer.close()
