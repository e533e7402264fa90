"""Paths through an engine's workflow whose histories are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError

from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.notices import EngineRemoved, VersionToLoad
from tests.workflows.conftest import IDLE, until
from tests.workflows.engine_agent import ScriptedAgent, at_work
from workflows import names
from workflows.state import EngineState

Path = Callable[[Client, ScriptedAgent], Awaitable[None]]


async def _publish(client: Client, agent: ScriptedAgent) -> None:
    loads = agent.loads
    await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
    await until(lambda: agent.loads > loads)


async def engine_publishes(client: Client, agent: ScriptedAgent) -> None:
    """Three versions, each of which the engine loads."""
    for _ in range(3):
        await _publish(client, agent)


async def engine_published_while_it_loads(client: Client, agent: ScriptedAgent) -> None:
    """Versions that are published during a load lead to one more load."""
    agent.gate.clear()
    await _publish(client, agent)
    for _ in range(3):
        await TemporalNotifier(client, IDLE).notify(VersionToLoad(agent.engine_id))
    agent.gate.set()
    await until(lambda: agent.loads == 2)


async def engine_restarted(client: Client, agent: ScriptedAgent) -> None:
    """The engine is unhealthy for a while, and loads again what it lost."""
    await _publish(client, agent)
    agent.report(healthy=False, problem="does not answer")
    await asyncio.sleep(0.3)
    agent.report(missing=["default-v1"])
    await until(lambda: agent.loads == 2)


async def engine_unloads(client: Client, agent: ScriptedAgent) -> None:
    """A version is no longer needed."""
    agent.report(versions=["default-v2"], leaving=["default-v1"])
    await until(lambda: agent.unloads == 1)


async def engine_agent_fails(client: Client, agent: ScriptedAgent) -> None:
    """A load fails for good, and is tried again later."""
    agent.fails = [ApplicationError("RecordUnusable", type="RecordUnusable", non_retryable=True)]
    await _publish(client, agent)


async def engine_removed(client: Client, agent: ScriptedAgent) -> None:
    """The engine is removed, which ends the workflow."""
    await _publish(client, agent)
    await TemporalNotifier(client, IDLE).notify(EngineRemoved(agent.engine_id))


async def engine_rolled_over(client: Client, agent: ScriptedAgent) -> None:
    """The history is long enough: the workflow continues as new."""
    for _ in range(4):
        await _publish(client, agent)


PATHS: tuple[Path, ...] = (
    engine_publishes,
    engine_published_while_it_loads,
    engine_restarted,
    engine_unloads,
    engine_agent_fails,
    engine_removed,
    engine_rolled_over,
)


async def history(client: Client, path: Path) -> WorkflowHistory:
    """What the first run of a workflow on this path leaves behind; the workflow itself never ends."""
    agent = ScriptedAgent()
    first = await client.start_workflow(
        names.ENGINE_WORKFLOW,
        EngineState(engine_id=agent.engine_id, roll_over_events=25 if path is engine_rolled_over else None),
        id=names.engine_workflow_id(agent.engine_id),
        task_queue=names.WORKFLOW_QUEUE,
    )
    async with at_work(client, agent):
        await path(client, agent)
        await asyncio.sleep(0.3)  # what it began is answered
        return await client.get_workflow_handle(first.id, run_id=first.first_execution_run_id).fetch_history()
