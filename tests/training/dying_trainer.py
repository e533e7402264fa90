"""A program for test_killed_trainer.py: a trainer's process that is killed in step 1 at one point, in step 2 at the
next, and so on, and then lives.

`python -m tests.training.dying_trainer TEMPORAL_ADDRESS DATABASE_URL PROCESS_JSON POINT…`. Each life is a process of
its own, forked so that torch is imported once. It takes steps as `clawloop worker trainer` does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawloop.steps import StepBatch, StepState, TrainedStep
from clawloop.temporal import connect
from clawloop.trainer import TrainerProcess, training_worker
from clawloop.training.resident import ResidentModel
from clawloop.training.trainer import ResidentTrainer
from db.engine import BACKGROUND_LIMIT, Database
from db.steps import PostgresStepStore

POINTS = ("batch is read", "micro-batch", "before the rename", "after the rename", "adapter is written", "committed")


@dataclass(frozen=True)
class Death:
    """Where a life ends: in step `n`, at this point; the last life has none."""

    n: int
    point: str | None

    def at(self, here: str, n: int) -> None:
        if (self.n, self.point) == (n, here):
            os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(PostgresStepStore):
    def __init__(self, database: Database, death: Death) -> None:
        super().__init__(database)
        self._death = death

    async def batch(self, policy: str, n: int) -> StepBatch:
        found = await super().batch(policy, n)
        self._death.at("batch is read", n)
        return found

    async def commit(self, step: StepBatch, trained: TrainedStep) -> StepState:
        self._death.at("adapter is written", step.n)
        state = await super().commit(step, trained)
        self._death.at("committed", step.n)
        return state


class DyingTrainer(ResidentTrainer):
    def __init__(self, model: ResidentModel, death: Death) -> None:
        super().__init__(model)
        self._death = death

    async def train(self, step: StepBatch, report: Callable[[str], None]) -> TrainedStep:
        def told(at: str) -> None:
            print(at, flush=True)
            if "train 3 of" in at:
                self._death.at("micro-batch", step.n)
            report(at)

        return await super().train(step, told)


def die_around_the_rename(death: Death) -> None:
    rename = Path.rename

    def renamed(path: Path, target: Any) -> Path:
        n = int(Path(target).name.removeprefix("v").split("-")[0])
        death.at("before the rename", n)
        found = rename(path, target)
        death.at("after the rename", n)
        return found

    Path.rename = renamed  # type: ignore[method-assign]


async def live(address: str, database_url: str, process: TrainerProcess, death: Death) -> None:
    process.setup.bound_threads()
    die_around_the_rename(death)
    trainer = DyingTrainer(ResidentModel(process.setup), death)
    store = DyingStore(Database(database_url, BACKGROUND_LIMIT), death)
    await training_worker(await connect(address), process.pool, store, trainer).run()


def main() -> None:
    address, database_url, given, *points = sys.argv[1:]
    process = TrainerProcess.model_validate_json(given)
    for n, point in enumerate((*points, None), start=1):
        print(f"life until {point}", flush=True)
        if (life := os.fork()) == 0:
            faulthandler.register(signal.SIGUSR1)
            asyncio.run(live(address, database_url, process, Death(n, point)))
            os._exit(0)
        signal.signal(signal.SIGTERM, lambda *_, life=life: (os.kill(life, signal.SIGKILL), os._exit(0)))
        _, status = os.waitpid(life, 0)
        assert os.WIFSIGNALED(status), f"it was to be killed at {point!r}"


if __name__ == "__main__":
    main()
