"""The Temporal workers of environments, their metrics, and what dead ones left on this machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.processes.worker_process import GRACE
from clawloop.core.contracts.episodes import AgentRun
from clawloop.core.episodes.running import EnvironmentActivities, EpisodeRunner, environment_queue
from clawloop.core.errors import PermanentError, TransientError
from clawloop.core.ids import EpisodeId
from clawloop.core.telemetry.metrics import EnvironmentMetrics

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0


class CountedRunner:
    """A runner with metrics. Satisfies `clawloop.core.episodes.running.EpisodeRunner`."""

    def __init__(self, runner: EpisodeRunner, metrics: EnvironmentMetrics) -> None:
        self._runner = runner
        self._metrics = metrics

    async def require_usable(self, environment: str, task_id: str) -> None:
        await self._runner.require_usable(environment, task_id)

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
        task_queue=environment_queue(name),
        activities=[activities.run_episode, activities.verify_episode],
        max_concurrent_activities=episodes,
        graceful_shutdown_timeout=GRACE,
    )


async def sweep_left_behind(sweep: Callable[[], int]) -> None:
    """Remove what killed workers left on this machine, now and each minute.

    Args:
        sweep: returns how many folders and containers it removed.
    """
    while True:
        if removed := await asyncio.to_thread(sweep):
            log.warning("swept what dead workers left", extra={"removed": removed})
        await asyncio.sleep(SWEEP_SECONDS)
