"""Trainers that are killed, or stopped and woken: one adapter for each step, the one an undisturbed trainer makes."""

from __future__ import annotations

import asyncio
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

from activities.training_messages import StepDone, TrainStep
from clawloop.steps import StepBatch, StepState, VersionRef
from clawloop.temporal import connect
from clawloop.trainer import TrainerProcess
from clawloop.training.resident import ResidentModel
from db.engine import Database
from db.steps import PostgresStepStore
from tests.contract.conftest import PATIENT
from tests.training.dying_trainer import POINTS
from tests.training.ledger import enter_samples
from tests.training.one_step import QUEUE, OneStep, asking
from tests.training.steps import RECIPE, never, quiet, samples_of, setup_of, whole
from workflows import attributes

ROOT = Path(__file__).parents[2]
# The tests wait for a dead trainer's silence; a real one is given half a minute of it.
SILENCE_SECONDS = 1.5


@dataclass
class Shop:
    """Samples for some steps in PostgreSQL, Temporal, and an undisturbed trainer in this process to compare with.

    Attributes:
        undisturbed: what it made, by step.
    """

    client: Client
    url: str
    store: PostgresStepStore
    setup: Any
    straight: ResidentModel
    pool: str = field(default_factory=lambda: uuid4().hex[:8])
    undisturbed: dict[int, VersionRef] = field(default_factory=dict)

    @property
    def process(self) -> TrainerProcess:
        return TrainerProcess(setup=self.setup, pool=self.pool)

    async def claim(self, n: int) -> StepBatch:
        """Claim step `n`, and take it here as well."""
        claimed = await self.store.claim("default", n)
        assert claimed.state is StepState.CLAIMED, claimed
        batch = await self.store.batch("default", n)
        self.undisturbed[n] = whole(self.straight.train(batch, quiet, never)).version
        return batch

    async def step(self, n: int) -> StepDone:
        """Have Temporal see to step `n`."""
        return await self.client.execute_workflow(
            OneStep.run,
            args=[TrainStep(policy="default", n=n), attributes.trainer_queue(self.pool), SILENCE_SECONDS],
            id=f"one-step/{uuid4()}",
            task_queue=QUEUE,
        )

    def rows(self, query: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
async def shop(temporal_address: str, postgres_url: str, qwen3: Path, tmp_path: Path) -> AsyncIterator[Shop]:
    database = Database(postgres_url, PATIENT)
    samples = [sample for n in range(1, len(POINTS) + 1) for sample in samples_of(qwen3, n)]
    await enter_samples(database, postgres_url, samples, RECIPE)
    client = await connect(temporal_address)
    straight = ResidentModel(setup_of(qwen3, tmp_path / "undisturbed"))
    setup = setup_of(qwen3, tmp_path / "adapters")
    async with asking(client):
        yield Shop(client, postgres_url, PostgresStepStore(database), setup, straight)
    await database.close()


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(shop: Shop, processes: ExitStack, log: Path, *points: str) -> subprocess.Popen[bytes]:
    address = shop.client.service_client.config.target_host
    command = [sys.executable, "-m", "tests.training.dying_trainer", address, shop.url]
    with log.open("wb") as output:
        running = subprocess.Popen(
            [*command, shop.process.model_dump_json(), *points],
            cwd=ROOT,
            env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )

    def end() -> None:
        running.send_signal(signal.SIGCONT)
        running.terminate()
        running.wait(10)

    processes.callback(end)
    return running


@pytest.mark.timeout(400)
async def test_a_step_survives_kills_at_any_point_and_makes_the_same_adapter(
    shop: Shop, processes: ExitStack, tmp_path: Path
) -> None:
    log = tmp_path / "trainer.log"
    begin(shop, processes, log, *POINTS)
    for n, point in enumerate(POINTS, start=1):
        await shop.claim(n)
        done = await asyncio.wait_for(shop.step(n), 120)
        assert (done.state, done.sha256) == (StepState.COMMITTED, shop.undisturbed[n].sha256), point
        assert f"life until {POINTS[n] if n < len(POINTS) else None}" in log.read_text(), point
    assert [row["n"] for row in shop.rows("SELECT n FROM versions WHERE n > 0 ORDER BY n")] == [*range(1, 7)]
    assert shop.rows("SELECT head FROM policies") == [{"head": 6}]
    assert shop.rows("SELECT state, count(*) FROM samples GROUP BY state") == [{"state": "trained", "count": 54}]
    # A step that was committed before the kill was answered, not taken again.
    assert log.read_text().count(f"step {len(POINTS)}: begins") == 1
    folders = [path.name for path in (shop.setup.adapters / "default").iterdir() if not path.name.startswith(".")]
    assert len(folders) == len(POINTS)
