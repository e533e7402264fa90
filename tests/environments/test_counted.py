"""Trainers and runners of episodes with metrics: what happens is counted by how it ended."""

from __future__ import annotations

from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from clawloop.app.processes.environment_queue import CountedRunner
from clawloop.core.contracts.episodes import AgentRun, Ending
from clawloop.core.errors import SandboxFailed
from clawloop.core.ids import EpisodeId
from clawloop.core.telemetry.metrics import EnvironmentMetrics, TrainerMetrics

EPISODE = EpisodeId(uuid4())


class Runner:
    """Satisfies `clawloop.core.episodes.running.EpisodeRunner`; without a key its sandbox fails."""

    def __init__(self, metrics: EnvironmentMetrics) -> None:
        self._registry = metrics.registry

    async def require_usable(self, environment: str, task_id: str) -> None:
        pass

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        assert self._registry.get_sample_value("clawloop_environment_sandboxes") == 1
        if not key:
            raise SandboxFailed("bubblewrap is missing")
        return AgentRun(Ending.TRUNCATED_TIME, "the limit was reached", b"")

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        return (1.0, "") if artifact else (None, "nothing was left")


async def test_episodes_and_verifiers_are_counted_by_how_they_ended() -> None:
    metrics = EnvironmentMetrics()
    runner = CountedRunner(Runner(metrics), metrics)
    await runner.run_agent("terminal", "t", EPISODE, "key")
    with pytest.raises(SandboxFailed):
        await runner.run_agent("terminal", "t", EPISODE, "")
    assert await runner.verify("terminal", "t", EPISODE, b"x") == (1.0, "")
    await runner.verify("terminal", "t", EPISODE, b"")
    assert values(metrics.registry, "clawloop_environment_episodes_total", "ending") == {
        "truncated_time": 1,
        "SandboxFailed": 1,
    }
    assert values(metrics.registry, "clawloop_environment_verified_total", "result") == {"rewarded": 1, "no reward": 1}
    assert metrics.registry.get_sample_value("clawloop_environment_sandboxes") == 0


def test_a_failed_step_is_a_series_before_one_fails() -> None:
    found = values(TrainerMetrics().registry, "clawloop_trainer_steps_total", "result")
    assert {"trained", "TrainerFailed", "StepDiverged", "DiskFull"} <= found.keys()
    assert set(found.values()) == {0}


def values(registry: CollectorRegistry, name: str, label: str) -> dict[str, float]:
    return {
        sample.labels[label]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }
