"""The worker of environments without a database: it asks a gateway for all that it does not get from Temporal.

It runs in a Python environment of its own, with the distribution `clawloop-environment` and what its environments need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.processes.environment_queue import CountedRunner, environment_worker, sweep_left_behind
from clawloop.app.processes.worker_process import WorkerRole, run_workers
from clawloop.core.episodes.running import EnvironmentActivities, EpisodeRunner
from clawloop.core.telemetry.metrics import EnvironmentMetrics
from clawloop.environments.choice import gateway_address, images_of, probe
from clawloop.environments.gateway import WorkerGateway
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import Environment
from clawloop.environments.verifiers.loading import VerifiersOptions, load
from clawloop.environments.verifiers.runner import KeyRelay, VerifiersRunner, sweep_rollouts
from clawloop.sandboxes.containers import SandboxesByImage
from clawloop.sandboxes.folders import BoxFolders


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """
    Args:
        temporal: `host:port`.
        gateway: its URL.
        key: with the scope `worker`.
        episodes: at a time, for each environment.
        health: address and port of `/healthz`, `/readyz` and `/metrics`; port 0 serves none.
        sandboxed: environments in sandboxes of ours.
        verifiers: environments of verifiers by their names in rollouts.
    """

    temporal: str
    gateway: str
    key: str = field(repr=False)
    episodes: int
    health: tuple[str, int]
    sandboxed: Mapping[str, Environment]
    verifiers: Mapping[str, VerifiersOptions]


async def run_remote_worker(worker: RemoteWorker) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        SetupError: no sandboxes here, an environment cannot be loaded, or the gateway refuses the key.
    """
    metrics, folders = EnvironmentMetrics(), BoxFolders()
    loaded = {name: await asyncio.to_thread(load, options) for name, options in worker.verifiers.items()}
    sandboxes = None
    if worker.sandboxed:
        images = images_of(worker.sandboxed.values())
        sandboxes = await asyncio.to_thread(SandboxesByImage.find, folders, images)
        await probe(worker.sandboxed.values(), sandboxes)

    async def create_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        gateway = await stack.enter_async_context(WorkerGateway.open(worker.gateway, worker.key))
        await gateway.check()
        runners: dict[str, EpisodeRunner] = {}
        if sandboxes is not None:
            stack.callback(asyncio.create_task(sweep_left_behind(sandboxes.sweep)).cancel)
            address = gateway_address(worker.gateway)
            runners |= {name: SandboxRunner(sandboxes, {name: one}, address) for name, one in worker.sandboxed.items()}
        if loaded:
            stack.callback(asyncio.create_task(sweep_left_behind(sweep_rollouts)).cancel)
        for name, environment in loaded.items():
            serving = VerifiersRunner.serving(environment, KeyRelay(worker.gateway))
            runners[name] = await stack.enter_async_context(serving)
        return [
            environment_worker(
                client,
                name,
                EnvironmentActivities(gateway.key_of, CountedRunner(runner, metrics), gateway),
                worker.episodes,
            )
            for name, runner in runners.items()
        ]

    host, port = worker.health
    role = WorkerRole("environment", create_workers, metrics.registry)
    await run_workers(role.name, worker.temporal, [role], port, health_host=host)
