"""The agent of one engine: the worker of its task queue, and a watch that can restart the engine.

It runs beside its engine, and both must see the adapters under the same path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack

from temporalio.client import Client
from temporalio.worker import Worker

from activities.serving.engines import EngineActivities, EngineControl
from clawloop.app.processes.database import ready_database, require_database
from clawloop.app.processes.endpoints import engine_secret, required_temporal_address
from clawloop.app.processes.worker_process import GRACE, LOOPBACK, WorkerRole, run_workers
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.notices import EngineAdded, Notifier
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import EngineUnavailable, SignalFailed
from clawloop.core.settings import Settings
from clawloop.core.telemetry.metrics import EngineMetrics
from clawloop.serving.adapters import VllmControl
from db.serving.engines import engine_of
from db.serving.publishing import PostgresPublishingStore
from workflows import names

log = logging.getLogger(__name__)

# One each of loading, unloading and watching; a new run of the workflow may start before the old run's watch ends.
_MAX_CONCURRENT_ACTIVITIES = 8
HEALTH_SECONDS = 5.0
# Failed health checks in a row before a restart: one may fall into a restart by someone else.
MAX_FAILED_CHECKS = 2
# Reading a large model from a slow disk; the restart command is not run again before.
START_SECONDS = 30 * 60.0
_RETRY_SECONDS = 5.0


async def run_agent(
    engine: str, settings: Settings, health_port: int, restart_command: str | None, health_host: str = LOOPBACK
) -> None:
    """Run the agent until SIGINT or SIGTERM.

    Args:
        engine: id or URL.
        health_port, health_host: as for `run_workers`.
        restart_command: for the shell; None: something else restarts the engine.

    Raises:
        SetupError: no database or no Temporal is configured, or `engine` is neither an id nor a URL.
    """
    require_database(settings)
    role = agent_role(engine, settings, restart_command)
    await run_workers(
        role.name,
        required_temporal_address(settings),
        [role],
        health_port,
        health_host=health_host,
        crash_points=settings.crash_points,
    )


def agent_role(engine: str, settings: Settings, restart_command: str | None = None) -> WorkerRole:
    """The role of an engine's agent; arguments as for `run_agent`.

    Raises:
        SetupError: `engine` is neither an id nor a URL.
    """
    engine_id, url = engine_of(engine)
    adapters = settings.data / "adapters"
    metrics = EngineMetrics()

    async def create_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        database = await ready_database(settings, stack)
        vllm = await stack.enter_async_context(VllmControl(url, adapters, engine_secret(settings)))
        control = CountedControl(vllm, metrics)
        for background in (
            _start_workflow(TemporalNotifier.of(client, settings), engine_id),
            _watch_health(vllm, metrics, restart_command),
        ):
            task = asyncio.create_task(background)
            stack.callback(task.cancel)
        activities = EngineActivities(PostgresPublishingStore(database), control)
        return [agent_worker(client, engine_id, activities)]

    return WorkerRole(f"engine {engine_id}", create_workers, metrics.registry)


def agent_worker(client: Client, engine_id: str, activities: EngineActivities) -> Worker:
    """The worker of one engine's task queue."""
    return Worker(
        client,
        task_queue=names.engine_queue(engine_id),
        activities=[activities.load_versions, activities.unload_versions, activities.watch_engine],
        max_concurrent_activities=_MAX_CONCURRENT_ACTIVITIES,
        graceful_shutdown_timeout=GRACE,
    )


async def _start_workflow(notifier: Notifier, engine_id: str) -> None:
    """Start the engine's workflow unless it runs, and retry."""
    while True:
        try:
            await notifier.notify(EngineAdded(engine_id))
            return
        except SignalFailed as error:
            # The orchestrator registers the search attributes, and may start later than this agent.
            log.warning("engine workflow not started yet", extra={"engine_id": engine_id, "why": str(error)})
            await asyncio.sleep(_RETRY_SECONDS)


async def _watch_health(control: EngineControl, metrics: EngineMetrics, restart_command: str | None) -> None:
    """Report the engine's health; restart a dead engine by the command, and allow it START_SECONDS to start."""
    failed_checks, restarted_at = 0, 0.0
    while True:
        try:
            healthy = await control.healthy()
        except EngineUnavailable:  # no answer in time, as from a busy engine
            healthy = True
        metrics.healthy.set(healthy)
        failed_checks = 0 if healthy else failed_checks + 1
        restarted_at = 0.0 if healthy else restarted_at
        starting = restarted_at and time.monotonic() - restarted_at <= START_SECONDS
        due = failed_checks >= MAX_FAILED_CHECKS and not starting
        if restart_command is not None and due:
            restarted_at = time.monotonic()
            metrics.restarts.inc()
            log.warning("engine dead, restarting it")
            process = await asyncio.create_subprocess_shell(restart_command)
            if await process.wait():
                log.error("restart command failed", extra={"status": process.returncode})
        await asyncio.sleep(HEALTH_SECONDS)


class CountedControl:
    """Satisfies `activities.serving.engines.EngineControl`; counts loads, unloads and adapters."""

    def __init__(self, control: EngineControl, metrics: EngineMetrics) -> None:
        self._control = control
        self._metrics = metrics

    async def load(self, version: VersionRef, name: str) -> None:
        began = time.perf_counter()
        try:
            await self._control.load(version, name)
        except Exception as error:
            self._metrics.loads.labels(type(error).__name__).inc()
            raise
        self._metrics.loads.labels("loaded").inc()
        self._metrics.load_seconds.observe(time.perf_counter() - began)

    async def unload(self, name: str) -> None:
        await self._control.unload(name)
        self._metrics.unloads.inc()

    async def names(self) -> frozenset[str]:
        names = await self._control.names()
        self._metrics.adapters.set(len(names))
        return names

    async def running(self) -> frozenset[str]:
        return await self._control.running()

    async def slots(self) -> int:
        return await self._control.slots()

    async def healthy(self) -> bool:
        return await self._control.healthy()
