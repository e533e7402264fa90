"""Rollouts of an environment that no worker serves: they wait, say so, and lose nothing. On a real Temporal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

from temporalio.client import Client

from clawloop.app.processes.bootstrap import prepare
from clawloop.app.temporal.server import TemporalEnvironmentWorkers
from clawloop.core.contracts.episodes import GroupState, NewGroup
from clawloop.core.ids import new_rollout_group_id
from tests.fakes.episode_store import FakeEpisodeStore
from tests.verbs import clawloop
from tests.workflows.conftest import end_all
from tests.workflows.scripted_rollouts import ScriptedRunner, environment_worker, orchestrating
from workflows import names
from workflows.rollouts import RolloutGroupWorkflow


def environment_of_its_own() -> ScriptedRunner:
    """Temporal remembers for minutes who asked for work, e.g. in another test."""
    runner = ScriptedRunner(FakeEpisodeStore())
    runner.environment = f"tasks-{uuid4().hex[:8]}"
    return runner


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(0.05)


async def test_episodes_wait_for_a_worker_that_comes_later_and_none_is_lost(client: Client) -> None:
    runner, workers = environment_of_its_own(), TemporalEnvironmentWorkers(client)
    group = NewGroup(new_rollout_group_id(), "default", runner.environment, "train-0", 2)
    await runner.store.make_group(group)
    runner.may_run.clear()
    async with orchestrating(client, runner.store, runner):
        handle = await client.start_workflow(
            RolloutGroupWorkflow.run,
            group.id,
            id=names.rollout_group_workflow_id(group.id),
            task_queue=names.WORKFLOW_QUEUE,
        )

        async def wait() -> bool:
            return len((await handle.describe()).raw_description.pending_activities) == 2

        await until(wait)
        assert not await workers.asks_for_work(runner.environment)
        assert not await workers.has_work([new_rollout_group_id(), group.id])  # of the first there is no workflow
        async with environment_worker(client, runner.store, runner):
            await until(lambda: workers.asks_for_work(runner.environment))
            await until(lambda: workers.has_work([new_rollout_group_id(), group.id]))
            runner.may_run.set()
            result = await handle.result()
    assert (result.state, result.scored) == (GroupState.SETTLED, 2)
    assert sorted(runner.ran) == [(0, 1), (1, 1)]
    assert not await workers.has_work([group.id])


async def test_commands_say_that_no_worker_serves_the_environment_until_one_does(
    client: Client, postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    runner = environment_of_its_own()
    await prepare(postgres_url, "tiny", [], ["http://127.0.0.1:9"], {})
    settings = {"DATABASE_URL": postgres_url, "TEMPORAL_ADDRESS": temporal_address, "CLAWLOOP_DATA": str(tmp_path)}
    line = f"problem     no worker serves the environment '{runner.environment}', and its episodes wait: "
    line += f"`clawloop worker environment --tasks {runner.environment}` starts one"
    try:
        start = ("rollouts", "start", "--environment", runner.environment)
        started = await asyncio.to_thread(clawloop, *start, **settings)
        assert (started.returncode, started.stderr) == (0, "")
        assert line in started.stdout
        all_stands = (await asyncio.to_thread(clawloop, "status", **settings)).stdout
        assert line.replace("problem     no", "problem    no") in all_stands
        assert line in (await asyncio.to_thread(clawloop, "rollouts", "pause", "lunch", **settings)).stdout
        assert line in (await asyncio.to_thread(clawloop, "rollouts", "status", **settings)).stdout
        async with environment_worker(client, runner.store, runner):
            await until(lambda: TemporalEnvironmentWorkers(client).asks_for_work(runner.environment))
            shown = await asyncio.to_thread(clawloop, "rollouts", "status", "--json", **settings)
        assert json.loads(shown.stdout)["no_worker"] == ""
    finally:
        await end_all(client)
