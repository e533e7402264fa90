"""A trainer's surroundings: samples in PostgreSQL, Temporal, and an undisturbed trainer to compare with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row
from temporalio.client import Client

from activities.training.messages import StepDone, TrainStep
from clawloop.contracts.training import StepBatch, StepState, TrainedStep
from clawloop.processes.trainer import TrainerProcess
from clawloop.temporal.client import connect
from clawloop.training.setup import TrainerSetup
from clawloop.training.step_runner import StepRunner
from db.database import Database
from db.training.steps import PostgresStepStore
from tests.contract.conftest import TEST_LIMIT
from tests.training.ledger import enter_samples
from tests.training.one_step import QUEUE, OneStep, asking
from tests.training.steps import RECIPE, never, quiet, samples_of, setup_of, whole
from workflows import names

ROOT = Path(__file__).parents[2]
# The tests wait for a dead trainer's silence; a real one is given half a minute of it.
SILENCE_SECONDS = 1.5
STEPS = 6


@dataclass
class Shop:
    """Samples for some steps in PostgreSQL, Temporal, and an undisturbed trainer in this process to compare with.

    Attributes:
        undisturbed: what it made, by step.
    """

    client: Client
    url: str
    store: PostgresStepStore
    setup: TrainerSetup
    straight: StepRunner
    pool: str = field(default_factory=lambda: uuid4().hex[:8])
    undisturbed: dict[int, TrainedStep] = field(default_factory=dict)

    def process(self, **named: Any) -> TrainerProcess:
        return TrainerProcess(setup=self.setup, pool=self.pool, **named)

    async def claim(self, n: int) -> StepBatch:
        """Claim step `n`, and take it here as well."""
        claimed = await self.store.claim("default", n)
        assert claimed.state is StepState.CLAIMED, claimed
        batch = await self.store.batch("default", n)
        self.undisturbed[n] = whole(self.straight.train(batch, quiet, never))
        return batch

    async def step(self, n: int) -> StepDone:
        """Have Temporal see to step `n`."""
        return await self.client.execute_workflow(
            OneStep.run,
            args=[TrainStep(policy="default", n=n), names.trainer_queue(self.pool), SILENCE_SECONDS],
            id=f"one-step/{uuid4()}",
            task_queue=QUEUE,
        )

    def rows(self, query: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
async def shop(temporal_address: str, postgres_url: str, qwen3: Path, tmp_path: Path) -> AsyncIterator[Shop]:
    database = Database(postgres_url, TEST_LIMIT)
    samples = [sample for n in range(1, STEPS + 1) for sample in samples_of(qwen3, n)]
    await enter_samples(database, postgres_url, samples, RECIPE)
    client = await connect(temporal_address)
    straight = StepRunner(setup_of(qwen3, tmp_path / "undisturbed"))
    setup = setup_of(qwen3, tmp_path / "adapters")
    async with asking(client):
        yield Shop(client, postgres_url, PostgresStepStore(database), setup, straight)
    await database.close()


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(shop: Shop, processes: ExitStack, log: Path, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program of ours; ended with the test."""
    told = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DATABASE_URL": shop.url,
        "TEMPORAL_ADDRESS": shop.client.service_client.config.target_host,
    }
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=dict(os.environ) | told,
            stdout=output,
            stderr=output,
        )

    def end() -> None:
        running.send_signal(signal.SIGCONT)
        running.terminate()
        running.wait(40)

    processes.callback(end)
    return running
