"""What a trainer's process needs: samples in PostgreSQL, Temporal, and an undisturbed step runner to compare with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row
from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.training.gate import DecideVersion, GateActivities
from activities.training.train_step import StepDone, TrainingActivities, TrainStep
from clawloop.app.processes.trainer import TrainerProcess
from clawloop.app.temporal.plugin import connect
from clawloop.core.contracts.training import StepBatch, StepState, TrainedStep
from clawloop.training.ranks import ignore_status
from clawloop.training.setup import TrainerSetup
from clawloop.training.step_runner import StepRunner
from db.database import Database
from db.training.gate import PostgresGateStore
from db.training.steps import PostgresStepStore
from tests.contract.conftest import TEST_LIMIT
from tests.training.ledger import insert_samples
from tests.training.steps import RECIPE, completed, never, samples_of, setup_of
from workflows import names

ROOT = Path(__file__).parents[2]
# The tests wait this long for a dead trainer's heartbeat; in operation it is half a minute.
HEARTBEAT_SECONDS = 1.5
STEPS = 6
QUEUE = "one-step"


@workflow.defn(name="OneStep")
class OneStep:
    """Runs one step and retries without a limit."""

    @workflow.run
    async def run(self, ask: TrainStep, queue: str, heartbeat_seconds: float) -> StepDone:
        return await workflow.execute_activity_method(
            TrainingActivities.train_step,
            ask,
            task_queue=queue,
            start_to_close_timeout=timedelta(minutes=2),
            heartbeat_timeout=timedelta(seconds=heartbeat_seconds),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100), backoff_coefficient=1.0),
        )


@dataclass
class TrainerBench:
    """Samples for some steps in PostgreSQL, Temporal, and an undisturbed step runner in this process to compare with.

    Attributes:
        undisturbed: step → what that runner made of it.
    """

    client: Client
    url: str
    store: PostgresStepStore
    gate: GateActivities
    setup: TrainerSetup
    undisturbed_runner: StepRunner
    pool: str = field(default_factory=lambda: uuid4().hex[:8])
    undisturbed: dict[int, TrainedStep] = field(default_factory=dict)

    def process(self, **named: Any) -> TrainerProcess:
        return TrainerProcess(setup=self.setup, pool=self.pool, **named)

    async def claim(self, n: int) -> StepBatch:
        """Claims step `n`, and trains it here as well."""
        claimed = await self.store.claim("default", n)
        assert claimed.state is StepState.CLAIMED, claimed
        batch = await self.store.batch("default", n)
        self.undisturbed[n] = completed(self.undisturbed_runner.train(batch, ignore_status, never))
        return batch

    async def step(self, n: int) -> StepDone:
        """Runs step `n` through Temporal, and has the gate decide about its version."""
        done: StepDone = await self.client.execute_workflow(
            OneStep.run,
            args=[TrainStep(policy="default", n=n), names.trainer_queue(self.pool), HEARTBEAT_SECONDS],
            id=f"one-step/{uuid4()}",
            task_queue=QUEUE,
        )
        if done.state is not StepState.CANDIDATE:
            return done
        decided = await self.gate.decide_version(DecideVersion(policy="default", n=n))
        return done.model_copy(update={"state": decided.state})

    def rows(self, query: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
async def bench(temporal_address: str, postgres_url: str, qwen3: Path, tmp_path: Path) -> AsyncIterator[TrainerBench]:
    database = Database(postgres_url, TEST_LIMIT)
    samples = [sample for n in range(1, STEPS + 1) for sample in samples_of(qwen3, n)]
    await insert_samples(database, postgres_url, samples, RECIPE)
    client = await connect(temporal_address)
    undisturbed_runner = StepRunner(setup_of(qwen3, tmp_path / "undisturbed"))
    setup = setup_of(qwen3, tmp_path / "adapters")
    async with Worker(client, task_queue=QUEUE, workflows=[OneStep], workflow_runner=UnsandboxedWorkflowRunner()):
        yield TrainerBench(
            client,
            postgres_url,
            PostgresStepStore(database),
            GateActivities(PostgresGateStore(database)),
            setup,
            undisturbed_runner,
        )
    await database.close()


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(
    bench: TrainerBench, processes: ExitStack, log: Path, module: str, *arguments: str
) -> subprocess.Popen[bytes]:
    """Starts a Python module as a process that ends with the test."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DATABASE_URL": bench.url,
        "TEMPORAL_ADDRESS": bench.client.service_client.config.target_host,
    }
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=dict(os.environ) | environment,
            stdout=output,
            stderr=output,
        )

    def end() -> None:
        running.send_signal(signal.SIGCONT)
        running.terminate()
        running.wait(40)

    processes.callback(end)
    return running
