"""The worker of environments: runs episodes and verifiers in sandboxes on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.processes.database import ready_database, require_database, sealer_of
from clawloop.app.processes.endpoints import required_temporal_address
from clawloop.app.processes.environment_queue import CountedRunner, environment_worker, sweep_left_behind
from clawloop.app.processes.worker_process import WorkerRole, run_workers
from clawloop.core.episodes.running import EnvironmentActivities
from clawloop.core.settings import Settings
from clawloop.core.telemetry.metrics import EnvironmentMetrics
from clawloop.environments.artifacts import open_artifacts
from clawloop.environments.choice import (
    BrowserOptions,
    allowed_variables,
    choose,
    gateway_address,
    images_of,
    probe,
)
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import CommandHarness
from clawloop.sandboxes.containers import SandboxesByImage
from clawloop.sandboxes.folders import BoxFolders
from db.episodes.groups import PostgresEpisodeStore


async def run_environment_worker(
    chosen: Sequence[str],
    tasks: Sequence[Path],
    gateway: str,
    episodes: int,
    settings: Settings,
    health: tuple[str, int],
    harness: CommandHarness | None = None,
    browser: BrowserOptions | None = None,
    variables: Sequence[str] = (),
) -> None:
    """Run until SIGINT or SIGTERM.

    Args:
        chosen: names of environments.
        tasks: folders of Harbor task directories; each is an environment of the folder's name.
        gateway: its URL, which sandboxes reach and nothing else.
        episodes: sandboxes at a time, for each environment.
        health: address and port of `/healthz`, `/readyz` and `/metrics`; port 0 serves none.
        harness: who plays; None: our agent loop.
        browser: for the environment of this name.
        variables: of this process that tasks may ask for.

    Raises:
        SetupError: no such environment, no sandboxes or no Chromium here, an invalid URL; no database or Temporal is
            configured.
    """
    environments = choose(chosen, tasks, harness, browser or BrowserOptions(), allowed_variables(variables))
    address = gateway_address(gateway)
    require_database(settings)
    temporal = required_temporal_address(settings)
    sealer = sealer_of(settings.encryption_key_file)
    folders = BoxFolders()
    sandboxes = await asyncio.to_thread(SandboxesByImage.find, folders, images_of(environments.values()))
    await probe(environments.values(), sandboxes)
    metrics = EnvironmentMetrics()

    async def create_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        database = await ready_database(settings, stack)
        artifacts = open_artifacts(settings, sealer, stack)
        stack.callback(asyncio.create_task(sweep_left_behind(sandboxes.sweep)).cancel)
        runner = CountedRunner(SandboxRunner(sandboxes, environments, address), metrics)
        activities = EnvironmentActivities(PostgresEpisodeStore(database).key_of, runner, artifacts)
        return [environment_worker(client, name, activities, episodes) for name in environments]

    host, port = health
    await run_workers(
        "environment",
        temporal,
        [WorkerRole("environment", create_workers, metrics.registry)],
        port,
        health_host=host,
        crash_points=settings.crash_points,
    )
