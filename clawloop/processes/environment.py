"""The worker of environments: runs episodes and verifiers in sandboxes on this machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from temporalio.client import Client
from temporalio.worker import Worker

from activities.episodes.ports import EpisodeRunner
from activities.episodes.running import EnvironmentActivities
from clawloop.contracts.episodes import AgentRun
from clawloop.environments.agent import CommandHarness
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.environments.browser.chromium import Chromium
from clawloop.environments.browser.environment import BrowserEnvironment
from clawloop.environments.harbor import HarborEnvironment
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.swe.environment import SweEnvironment
from clawloop.environments.task import Environment
from clawloop.environments.terminal.environment import TerminalEnvironment
from clawloop.environments.tool_call.environment import ToolCallEnvironment
from clawloop.errors import PermanentError, SetupError, TransientError
from clawloop.ids import EpisodeId
from clawloop.processes.database import ready_database, require_database, sealer_of
from clawloop.processes.worker_process import GRACE, run_workers
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from clawloop.settings import Settings
from clawloop.telemetry.metrics import EnvironmentMetrics
from db.episodes.groups import PostgresEpisodeStore
from workflows import names

log = logging.getLogger(__name__)

# What a worker runs that is told nothing, and all; a browser takes memory, and is not everywhere.
DEFAULT_ENVIRONMENTS = (SweEnvironment.name, TerminalEnvironment.name, ToolCallEnvironment.name)
ENVIRONMENTS = (BrowserEnvironment.name, *DEFAULT_ENVIRONMENTS)
SWEEP_SECONDS = 60.0
PRUNE_SECONDS = 3600.0


async def run_environment_worker(
    chosen: Sequence[str],
    tasks: Sequence[Path],
    gateway: str,
    episodes: int,
    settings: Settings,
    health: tuple[str, int],
    harness: CommandHarness | None = None,
    browser: BrowserOptions | None = None,
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

    Raises:
        SetupError: no such environment, no sandboxes or no Chromium here, an invalid URL; no database or Temporal is
            configured.
    """
    environments = choose(chosen, tasks, harness, browser or BrowserOptions())
    address = gateway_address(gateway)
    require_database(settings)
    sealer = sealer_of(settings.encryption_key_file)
    folders = BoxFolders()
    sandboxes = await asyncio.to_thread(Bubblewrap.find, folders)
    for environment in environments.values():
        if isinstance(environment, BrowserEnvironment):
            await environment.probe(sandboxes)
    metrics = EnvironmentMetrics()

    async def create_workers(client: Client, stack: AsyncExitStack) -> list[Worker]:
        database = await ready_database(settings, stack)
        artifacts = ArtifactFolder(settings.data / "artifacts", sealer)
        kept = timedelta(days=settings.artifact_days)
        for upkeep in (_sweep(folders), _prune(artifacts, kept)):
            stack.callback(asyncio.create_task(upkeep).cancel)
        runner = CountedRunner(SandboxRunner(sandboxes, environments, address), metrics)
        activities = EnvironmentActivities(PostgresEpisodeStore(database), runner, artifacts)
        return [environment_worker(client, name, activities, episodes) for name in environments]

    host, port = health
    await run_workers("environment", settings, create_workers, port, health_host=host, registry=metrics.registry)


class CountedRunner:
    """A runner with metrics. Satisfies `activities.episodes.ports.EpisodeRunner`."""

    def __init__(self, runner: EpisodeRunner, metrics: EnvironmentMetrics) -> None:
        self._runner = runner
        self._metrics = metrics

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        began = time.perf_counter()
        with self._metrics.sandboxes.track_inprogress():
            try:
                run = await self._runner.run_agent(environment, task_id, episode, key)
            except (PermanentError, TransientError) as error:
                self._metrics.episodes.labels(environment, type(error).__name__).inc()
                raise
        self._metrics.episodes.labels(environment, run.ending.value).inc()
        self._metrics.episode_seconds.labels(environment).observe(time.perf_counter() - began)
        return run

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        with self._metrics.sandboxes.track_inprogress():
            try:
                reward, reason = await self._runner.verify(environment, task_id, episode, artifact)
            except (PermanentError, TransientError) as error:
                self._metrics.verified.labels(environment, type(error).__name__).inc()
                raise
        self._metrics.verified.labels(environment, "no reward" if reward is None else "rewarded").inc()
        return reward, reason


def environment_worker(client: Client, name: str, activities: EnvironmentActivities, episodes: int) -> Worker:
    """The worker of one environment's queue."""
    return Worker(
        client,
        task_queue=names.environment_queue(name),
        activities=[activities.run_episode, activities.verify_episode],
        max_concurrent_activities=episodes,
        graceful_shutdown_timeout=GRACE,
    )


@dataclass(frozen=True, slots=True)
class BrowserOptions:
    """Of the environment `browser`, see `Chromium.find` and `BrowserEnvironment`."""

    chromium: Path | None = None
    screenshots: bool = False


def choose(
    names: Sequence[str],
    tasks: Sequence[Path] = (),
    harness: CommandHarness | None = None,
    browser: BrowserOptions = BrowserOptions(),
) -> dict[str, Environment]:
    """
    Raises:
        SetupError: no environment has this name, two have the same, a task directory is unusable, the environment
            takes no other harness, or its browser is missing.
    """
    chosen: dict[str, Environment] = {}
    for name in names:
        chosen[name] = _ours(name, harness, browser)
    for folder in tasks:
        environment = HarborEnvironment.read(folder, harness)
        if environment.name in ENVIRONMENTS or environment.name in chosen:
            raise SetupError(
                f"--tasks {folder}: there is an environment {environment.name!r} already; rename the folder"
            )
        chosen[environment.name] = environment
    return chosen


def _ours(name: str, harness: CommandHarness | None, browser: BrowserOptions) -> Environment:
    if name == SweEnvironment.name:
        return SweEnvironment(harness)
    if name == TerminalEnvironment.name:
        return TerminalEnvironment(harness)
    if name not in ENVIRONMENTS:
        raise SetupError(f"there is no environment {name!r}: there is {', '.join(ENVIRONMENTS)}")
    if harness is not None:
        raise SetupError(f"--harness: {name} has its own; give --environment terminal or swe, or --tasks")
    if name == BrowserEnvironment.name:
        return BrowserEnvironment(Chromium.find(browser.chromium), browser.screenshots)
    return ToolCallEnvironment()


def gateway_address(url: str) -> tuple[str, int]:
    """Host and port of the gateway's URL.

    Raises:
        SetupError: it is no `http://HOST:PORT`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = None
    if parts is None or parts.scheme != "http" or not host:
        raise SetupError(f"--gateway must be http://HOST:PORT, not {url!r}: sandboxes reach the gateway without TLS")
    return host, port or 80


async def _sweep(folders: BoxFolders) -> None:
    """Remove what sandboxes of killed workers left on this machine."""
    while True:
        if removed := await asyncio.to_thread(folders.sweep):
            log.warning("swept sandboxes of dead workers", extra={"folders": removed})
        await asyncio.sleep(SWEEP_SECONDS)


async def _prune(artifacts: ArtifactFolder, age: timedelta) -> None:
    """Delete artifacts that nobody needs any more, now and each hour."""
    while True:
        try:
            if removed := await artifacts.prune(age):
                log.info("artifacts deleted", extra={"files": removed, "older_than_days": age.days})
        except OSError as error:
            log.warning("artifacts not deleted", extra={"why": str(error)})
        await asyncio.sleep(PRUNE_SECONDS)
