"""An engine's agent put together: its queue, its workflow, and a watch that restarts an engine nobody else restarts.

Knows nothing about how it is supervised. It stands beside its engine and must see the adapters under the same path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack

from temporalio.client import Client
from temporalio.worker import Worker

from activities.serving.engines import EngineActivities
from activities.serving.ports import EngineControl
from clawloop.contracts.training import VersionRef
from clawloop.errors import EngineUnavailable, SignalFailed
from clawloop.processes.endpoints import database_url
from clawloop.processes.workers import GRACE, serve
from clawloop.serving.adapters import VllmControl
from clawloop.settings import Settings
from clawloop.telemetry.metrics import EngineMetrics
from clawloop.temporal.engine_notifier import TemporalEngineNotifier
from db.database import BACKGROUND_LIMIT, Database
from db.serving.engines import engine_of
from db.serving.publishing import PostgresPublishingStore
from workflows import names

log = logging.getLogger(__name__)

# Loading, unloading and the watch, each once; a new run of the workflow may begin before the old one's watch ended.
_ACTIVITIES_AT_ONCE = 8
HEALTH_SECONDS = 5.0
# Dead at two looks in turn: one may fall into a restart that somebody else does.
DEAD_LOOKS = 2
# Weights of a large model from a slow disk; a command that helped is not run again before.
START_SECONDS = 30 * 60.0
_BEGIN_AGAIN_SECONDS = 5.0


async def run_agent(engine: str, settings: Settings, health_port: int, restart_command: str | None) -> None:
    """Work until asked to stop.

    Args:
        engine: its id or its URL.
        restart_command: for the shell; None: something else restarts the engine.

    Raises:
        SetupError: no database or no Temporal is given, or this is no engine's address.
    """
    engine_id, url = engine_of(engine)
    address, adapters = database_url(settings), settings.data / "adapters"
    metrics = EngineMetrics()

    async def workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        database = Database(address, BACKGROUND_LIMIT)
        stack.push_async_callback(database.close)
        vllm = await stack.enter_async_context(VllmControl(url, adapters))
        control = CountedControl(vllm, metrics)
        for work in (
            _begin_workflow(client, engine_id),
            _keep_alive(vllm, metrics, restart_command),
        ):
            task = asyncio.create_task(work)
            stack.callback(task.cancel)
        activities = EngineActivities(PostgresPublishingStore(database), control)
        return [agent_worker(client, engine_id, activities)]

    await serve(f"engine {engine_id}", settings, workers, health_port, registry=metrics.registry)


def agent_worker(client: Client, engine_id: str, activities: EngineActivities) -> Worker:
    """What does one engine's activities."""
    return Worker(
        client,
        task_queue=names.engine_queue(engine_id),
        activities=[activities.load_versions, activities.unload_versions, activities.watch_engine],
        max_concurrent_activities=_ACTIVITIES_AT_ONCE,
        graceful_shutdown_timeout=GRACE,
    )


async def _begin_workflow(client: Client, engine_id: str) -> None:
    while True:
        try:
            await TemporalEngineNotifier(client).begin(engine_id)
            return
        except SignalFailed as error:
            # The orchestrator makes the search attributes known; it may start after us.
            log.warning("the engine's workflow not begun yet", extra={"engine_id": engine_id, "why": str(error)})
            await asyncio.sleep(_BEGIN_AGAIN_SECONDS)


async def _keep_alive(control: EngineControl, metrics: EngineMetrics, restart_command: str | None) -> None:
    """Tell whether the engine lives; run the command when it does not, and then give it time to start."""
    dead, asked_at = 0, 0.0
    while True:
        try:
            healthy = await control.healthy()
        except EngineUnavailable:  # silent, which a busy one may be
            healthy = True
        metrics.healthy.set(healthy)
        dead = 0 if healthy else dead + 1
        asked_at = 0.0 if healthy else asked_at
        due = dead >= DEAD_LOOKS and (not asked_at or time.monotonic() - asked_at > START_SECONDS)
        if restart_command is not None and due:
            asked_at = time.monotonic()
            metrics.restarts.inc()
            log.warning("engine dead, restarting it")
            process = await asyncio.create_subprocess_shell(restart_command)
            if await process.wait():
                log.error("restart command failed", extra={"status": process.returncode})
        await asyncio.sleep(HEALTH_SECONDS)


class CountedControl:
    """Satisfies `activities.serving.ports.EngineControl`, and counts what it does."""

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
