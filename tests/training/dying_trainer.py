"""A program for test_killed_trainer.py: a trainer's process that is killed in step 1 at one point, in step 2 at the
next, and so on, and then lives.

`python -m tests.training.dying_trainer PROCESS_JSON POINT…`. Each life is a process of
its own, forked so that torch is imported once. It takes steps as `clawloop worker trainer` does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clawloop.app.processes.trainer import TrainerProcess, training_worker
from clawloop.app.temporal.plugin import connect
from clawloop.core.contracts.training import GateCheck, Pace, StatusCallback, StepBatch, StepState, TrainedStep
from clawloop.training.step_runner import StepRunner
from clawloop.training.threaded_trainer import ThreadedTrainer
from db.database import BACKGROUND_LIMIT, Database
from db.training.steps import PostgresStepStore

POINTS = ("batch is read", "micro-batch", "before the rename", "after the rename", "adapter is written", "committed")


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Death:
    """Where a life ends: in step `n`, at this point; the last life has none. `stopped: POINT` is no end."""

    n: int
    point: str | None

    def at(self, here: str, n: int) -> None:
        if (self.n, self.point) == (n, here):
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.n, self.point) == (n, f"stopped: {here}"):
            print_line(f"stopped {os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
            print_line("woken")


class DyingStore(PostgresStepStore):
    def __init__(self, database: Database, death: Death) -> None:
        super().__init__(database)
        self._death = death

    async def batch(self, policy: str, n: int) -> StepBatch:
        found = await super().batch(policy, n)
        self._death.at("batch is read", n)
        return found

    async def commit(self, step: StepBatch, trained: TrainedStep, checks: Sequence[GateCheck] = ()) -> StepState:
        self._death.at("adapter is written", step.n)
        # A stopped process is cancelled as soon as it wakes; its commit must arrive all the same.
        return await asyncio.shield(self._committed(step, trained, checks))

    async def _committed(self, step: StepBatch, trained: TrainedStep, checks: Sequence[GateCheck]) -> StepState:
        state = await super().commit(step, trained, checks)
        print_line(f"step {step.n}: {state}")
        self._death.at("committed", step.n)
        return state


class DyingTrainer(ThreadedTrainer):
    def __init__(self, model: StepRunner, death: Death) -> None:
        super().__init__(model)
        self._death = death

    async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        def report_or_die(status: str, pace: Pace | None = None) -> None:
            print_line(status)
            if "training, micro-batch 3 of" in status:
                self._death.at("micro-batch", step.n)
            report(status, pace)

        return await super().train(step, report_or_die)


def die_around_the_rename(death: Death) -> None:
    rename = Path.rename

    def renamed(path: Path, target: Any) -> Path:
        n = int(Path(target).name.removeprefix("v").split("-")[0])
        death.at("before the rename", n)
        found = rename(path, target)
        death.at("after the rename", n)
        return found

    Path.rename = renamed  # type: ignore[method-assign, assignment]


async def live(address: str, database_url: str, process: TrainerProcess, death: Death) -> None:
    process.setup.bound_threads()
    die_around_the_rename(death)
    trainer = DyingTrainer(StepRunner(process.setup), death)
    store = DyingStore(Database(database_url, BACKGROUND_LIMIT), death)
    await training_worker(await connect(address), process.pool, store, trainer).run()


def end(life: int, *_: object) -> None:
    os.kill(life, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    given, *points = sys.argv[1:]
    address, database_url = os.environ["TEMPORAL_ADDRESS"], os.environ["DATABASE_URL"]
    process = TrainerProcess.model_validate_json(given)
    for n, point in enumerate((*points, None), start=1):
        print_line(f"life until {point}")
        if (life := os.fork()) == 0:
            asyncio.run(live(address, database_url, process, Death(n, point)))
            os._exit(0)
        signal.signal(signal.SIGTERM, partial(end, life))
        _, status = os.waitpid(life, 0)
        assert os.WIFSIGNALED(status), f"it was to be killed at {point!r}"


if __name__ == "__main__":
    main()
