"""The trainer's process: a Temporal worker with a step runner, alone or as ranks under torchrun.

The only process that loads torch. Of several ranks the first runs the Temporal worker, the others serve its commands.
When a rank dies, torchrun restarts all of them, and Temporal retries the step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta

from pydantic import BaseModel, ConfigDict
from temporalio.client import Client
from temporalio.worker import Worker
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from activities.training.steps import StepStore
from activities.training.train_step import Trainer, TrainingActivities
from clawloop.app.processes.database import ready_database, require_database
from clawloop.app.processes.endpoints import required_temporal_address
from clawloop.app.processes.process_exit import end_with_parent, exit_process
from clawloop.app.processes.worker_process import GRACE, LOOPBACK, WorkerRole, run_workers
from clawloop.core.contracts.training import StatusCallback, StepBatch, StepRecord, TrainedStep
from clawloop.core.errors import ClawloopError, PermanentError, TrainerUnavailable, TransientError
from clawloop.core.settings import Settings, read_settings
from clawloop.core.telemetry.logs import configure_logging
from clawloop.core.telemetry.metrics import TrainerMetrics
from clawloop.training.adapters.files import remove_unfinished
from clawloop.training.ranks import COMMAND_TIMEOUT, Ranks, join, leave_process_group, serve_rank
from clawloop.training.run_log import TensorBoardLog
from clawloop.training.setup import TrainerSetup, cores
from clawloop.training.step_runner import StepRunner
from clawloop.training.threaded_trainer import PING_INTERVAL, ThreadedTrainer
from db.training.steps import PostgresStepStore
from db.turns.read import ConversationCache
from workflows import names

log = logging.getLogger(__name__)

# torchrun counts restarts over its whole life; a trainer runs for months and must survive dead ranks.
_RESTARTS = 1_000_000
# A directory still unfinished after a day belongs to a killed writer.
_UNFINISHED_AGE = timedelta(days=1)


class TrainerProcess(BaseModel):
    """Settings of a trainer's process; passed to its ranks as JSON.

    Args:
        pool: the pool whose steps it takes.
        nproc: ranks on this machine.
        health_port, health_host: as for `run_workers`.
        ping_interval, command_timeout: see `ThreadedTrainer` and `clawloop.training.ranks`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    setup: TrainerSetup
    pool: str = "default"
    nproc: int = 1
    health_port: int = 0
    health_host: str = LOOPBACK
    ping_interval: timedelta = PING_INTERVAL
    command_timeout: timedelta = COMMAND_TIMEOUT


def run_trainer(process: TrainerProcess, settings: Settings) -> None:
    """Runs steps until the process is asked to stop.

    Raises:
        SetupError: the model, the device, the database or Temporal is missing or unusable.
    """
    process.setup.check(process.nproc)
    require_database(settings)
    if process.nproc > 1:
        _run_ranks(process)
        return
    process.setup.bound_threads()
    try:
        asyncio.run(_serve(process, settings, StepRunner(process.setup)))
    except TrainerUnavailable as error:
        log.error("trainer ended", extra={"why": str(error)})
        exit_process(1)  # Python's shutdown would wait for the hanging thread


def _run_ranks(process: TrainerProcess) -> None:
    """Runs torchrun's agent in this process: it starts the ranks, and restarts them all when one dies."""
    threads = process.setup.threads or max(1, cores() // process.nproc)
    rank_process = process.model_copy(update={"setup": process.setup.model_copy(update={"threads": threads})})
    launched = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=process.nproc,
        run_id=f"clawloop-{process.pool}-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=_RESTARTS,
        monitor_interval=0.5,
    )
    # All ranks are on this machine, and every client that reaches their ports could speak with them.
    for interface in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(interface, "lo")
    try:
        elastic_launch(launched, sys.executable)(
            "-u", "-m", "clawloop.app.processes.trainer", rank_process.model_dump_json()
        )
    except SignalException:
        log.info("worker stopped", extra={"role": "trainer"})
    except ChildFailedError as error:
        raise TrainerUnavailable(f"the ranks failed: {error.name}") from error


async def _serve(process: TrainerProcess, settings: Settings, runner: StepRunner) -> None:
    metrics = TrainerMetrics()
    folder = settings.tensorboard_folder
    run_log = None if folder is None else TensorBoardLog(folder).write
    trainer = ThreadedTrainer(runner, ping_interval=process.ping_interval)
    for of_policy in process.setup.adapters.glob("*"):
        remove_unfinished(of_policy, _UNFINISHED_AGE)

    async def workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        database = await ready_database(settings, stack)
        store = PostgresStepStore(database, ConversationCache(settings.conversation_cache_bytes))
        return [training_worker(client, process.pool, store, InstrumentedTrainer(trainer, metrics), run_log)]

    watching = asyncio.create_task(trainer.watch_ranks())
    try:
        await run_workers(
            "trainer",
            required_temporal_address(settings),
            [WorkerRole("trainer", workers, metrics.registry, trainer.broken)],
            process.health_port,
            health_host=process.health_host,
            crash_points=settings.crash_points,
        )
    finally:
        watching.cancel()
        await trainer.close()


def training_worker(
    client: Client, pool: str, steps: StepStore, trainer: Trainer, run_log: Callable[[StepRecord], None] | None = None
) -> Worker:
    """The Temporal worker of a pool's queue, one step at a time."""
    return Worker(
        client,
        task_queue=names.trainer_queue(pool),
        activities=[TrainingActivities(steps, trainer, run_log=run_log).train_step],
        # Without a build id Temporal's SDK hashes the code of every loaded module: with torch, seconds.
        build_id="clawloop",
        max_concurrent_activities=1,
        # After it a running step is cancelled, and ends at its next micro-batch.
        graceful_shutdown_timeout=GRACE,
    )


class InstrumentedTrainer:
    """A trainer with metrics. Satisfies `activities.training.train_step.Trainer`."""

    def __init__(self, trainer: Trainer, metrics: TrainerMetrics) -> None:
        self._trainer = trainer
        self._metrics = metrics

    async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        try:
            trained = await self._trainer.train(step, report)
        except (PermanentError, TransientError) as error:
            self._metrics.steps.labels(type(error).__name__).inc()
            raise
        figures = trained.figures
        self._metrics.steps.labels("trained").inc()
        self._metrics.step_seconds.observe(trained.seconds)
        self._metrics.tokens.inc(figures.tokens)
        self._metrics.dropped.inc(len(figures.dropped))
        self._metrics.loss.labels(step.policy).set(figures.loss)
        self._metrics.ratio.labels(step.policy).set(figures.ratio)
        if figures.kl is not None:
            self._metrics.kl.labels(step.policy).set(figures.kl)
        return trained


def _rank(process: TrainerProcess) -> int:
    """Runs one rank until it ends; returns its exit code."""
    process.setup.bound_threads()
    ranks: Ranks = join(process.setup.torch_device(), process.command_timeout)
    runner = StepRunner(process.setup, ranks)
    if ranks.is_first:
        asyncio.run(_serve(process, read_settings(), runner))
        return 0
    # The first rank ends the others between micro-batches; a rank that ended on a signal would leave them waiting.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    serve_rank(runner)
    return 0


def main() -> None:
    """One rank, started by torchrun."""
    end_with_parent(signal.SIGKILL)  # if torchrun is killed; a step survives that at any point
    configure_logging(secrets=read_settings().secrets)
    process = TrainerProcess.model_validate_json(sys.argv[1])
    try:
        code = _rank(process)
    except ClawloopError as error:
        log.error("rank ended", extra={"why": str(error)})
        code = 1
    except RuntimeError:
        # Raised by torch when a rank is gone; torchrun restarts all.
        log.exception("rank ended")
        code = 1
    if code == 0:
        leave_process_group()
    exit_process(code)


if __name__ == "__main__":
    main()
