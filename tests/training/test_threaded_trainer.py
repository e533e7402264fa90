"""Steps in the trainer's thread that are cancelled, hang or fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from clawloop.core.contracts.training import BatchSample, Pace, StatusCallback, StepBatch, TrainedStep
from clawloop.core.errors import DiskFull, TrainerFailed, TrainerUnavailable
from clawloop.training import step_runner
from clawloop.training.packing import Limits
from clawloop.training.ranks import Ranks, ignore_status
from clawloop.training.step_runner import AttemptRecord, StepRunner
from clawloop.training.threaded_trainer import ThreadedTrainer
from tests.training.steps import completed, never, samples_of, setup_of, step_of


@pytest.fixture(scope="module")
def samples(qwen3: Path) -> list[BatchSample]:
    return samples_of(qwen3, 1)


async def test_a_cancelled_step_ends_at_the_next_micro_batch_and_the_next_step_succeeds(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path / "a")))
    reported: list[str] = []
    go_on = threading.Event()

    def report(status: str, pace: Pace | None = None) -> None:
        reported.append(status)
        if status == "step 1: training, micro-batch 2 of 5":
            go_on.wait(20)

    running = asyncio.create_task(trainer.train(step_of(samples, 1), report))
    while reported[-1:] != ["step 1: training, micro-batch 2 of 5"]:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reported[-1] == "step 1: training, micro-batch 2 of 5"
    assert not list((tmp_path / "a" / "default").glob("*"))
    done = await trainer.train(step_of(samples, 1), ignore_status)
    expected = completed(StepRunner(setup_of(qwen3, tmp_path / "b")).train(step_of(samples, 1), ignore_status, never))
    assert done.version == expected.version
    await trainer.close()


class HangingRunner(StepRunner):
    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.go_on = threading.Event()

    def train(self, step: StepBatch, report: StatusCallback, should_stop: Callable[[], bool]) -> TrainedStep | None:
        report("step 1: begins")
        self.go_on.wait(20)
        raise TrainerUnavailable("it went on")


class NicenessRunner(StepRunner):
    def train(self, step: StepBatch, report: StatusCallback, should_stop: Callable[[], bool]) -> TrainedStep | None:
        raise TrainerUnavailable(f"computes at {os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}")


async def test_on_a_cpu_a_step_takes_what_others_leave_idle_and_heartbeats_stay_punctual(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path
) -> None:
    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, trainer = own(), ThreadedTrainer(NicenessRunner(setup_of(qwen3, tmp_path)))
    with pytest.raises(TrainerUnavailable, match=f"computes at {max(10, before)}"):
        await trainer.train(step_of(samples, 1), ignore_status)
    assert own() == before
    await trainer.close()


def test_where_linux_shares_time_among_sessions_the_trainers_whole_session_gives_way() -> None:
    told = "from clawloop.training import threaded_trainer; threaded_trainer._yield_to_others()"
    read = "from pathlib import Path; group = Path('/proc/self/autogroup')"
    child = f"{told}; {read}; print(group.read_text().split()[-1] if group.exists() else 10)"
    # As `clawloop up` starts it: its parent leads the session.
    leader = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    found = subprocess.run(
        [sys.executable, "-c", leader], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert found.stdout.strip() == "10"


async def test_a_hanging_step_is_abandoned_and_marks_the_trainer_broken(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path
) -> None:
    model = HangingRunner(setup_of(qwen3, tmp_path))
    trainer = ThreadedTrainer(model, stall_limit=timedelta(seconds=0.5))
    with pytest.raises(TrainerUnavailable, match="the step reported no progress"):
        await trainer.train(step_of(samples, 1), ignore_status)
    assert trainer.broken.is_set()
    with pytest.raises(TrainerUnavailable, match="being restarted"):
        await trainer.train(step_of(samples, 1), ignore_status)
    model.go_on.set()
    await trainer.close()


async def test_a_bug_in_one_step_does_not_break_the_trainer(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr("clawloop.training.step_runner.train_step", lambda *given, **named: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await trainer.train(step_of(samples, 1), ignore_status)
    assert not trainer.broken.is_set()
    assert (await trainer.train(step_of(samples, 1), ignore_status)).version.n == 1
    await trainer.close()


async def test_a_failed_gpu_marks_the_trainer_broken(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path)))

    def illegal(*given: object, **named: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("clawloop.training.step_runner.train_step", illegal)
    with pytest.raises(TrainerUnavailable, match="the GPU failed"):
        await trainer.train(step_of(samples, 1), ignore_status)
    assert trainer.broken.is_set()
    await trainer.close()


@pytest.mark.parametrize(
    ("kills", "marked", "said"),
    [
        (4, False, r"out of memory: the kernel killed the trainer or a rank.*lower --micro-batch-tokens"),
        (3, True, r"out of memory: a rank ran out of memory; lower --micro-batch-tokens"),
        (3, False, r"a rank died, or failed alone"),
    ],
)
async def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_one_that_crashed(
    kills: int,
    marked: bool,
    said: str,
    qwen3: Path,
    samples: list[BatchSample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_runner, "oom_kills", lambda: 3)
    step = step_of(samples, 1)
    runner = StepRunner(setup_of(qwen3, tmp_path), Ranks(rank=0, world_size=2))
    AttemptRecord(tmp_path, step.policy).begin(step, samples, Limits(40, 256, 199))
    monkeypatch.setattr(step_runner, "oom_kills", lambda: kills)

    def other_rank_is_gone(*given: object) -> None:
        if marked:  # by the other rank
            (tmp_path / f".attempt-{step.policy}.out-of-memory").touch()
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("clawloop.training.threaded_trainer.broadcast_step", other_rank_is_gone)
    trainer = ThreadedTrainer(runner)
    with pytest.raises(TrainerFailed, match=said):
        await trainer.train(step, ignore_status)
    assert trainer.broken.is_set()
    await trainer.close()


async def test_a_full_disk_ends_the_step_and_the_next_one_succeeds(
    qwen3: Path, samples: list[BatchSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ThreadedTrainer(StepRunner(setup_of(qwen3, tmp_path)))

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(DiskFull, match="version 1 cannot be written: No space left on device"):
            await trainer.train(step_of(samples, 1), ignore_status)
    assert not list((tmp_path / "default").iterdir())
    assert (await trainer.train(step_of(samples, 1), ignore_status)).version.n == 1
    await trainer.close()
