"""An engine's workflow with an agent that is scripted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from temporalio import activity
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.serving.engines import EngineLoad, EngineReport, EngineUnload, EngineWatch
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.notices import EngineAdded
from tests.workflows.conftest import IDLE, until
from workflows import names
from workflows.engine import EngineWorkflow

_numbers = itertools.count()


class ScriptedAgent:
    """Stands in for an engine's agent.

    Attributes:
        has: the state that the next watch returns; set `changed` to let it return.
        gate: loads wait for it.
        fails: how the next loads fail.
    """

    def __init__(self) -> None:
        self.engine_id = f"gpu:{next(_numbers)}"
        self.has = EngineReport(engine_id=self.engine_id, healthy=True)
        self.changed = asyncio.Event()
        self.watched: list[EngineWatch] = []
        self.loads = 0
        self.unloads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: list[ApplicationError] = []

    def report(self, **facts: object) -> None:
        self.has = EngineReport.model_validate({"engine_id": self.engine_id, "healthy": True} | facts)
        self.changed.set()

    @activity.defn(name="watch_engine")
    async def watch_engine(self, ask: EngineWatch) -> EngineReport:
        self.watched.append(ask)
        if ask.seen is not None:
            await self.changed.wait()
            self.changed.clear()
        return self.has

    @activity.defn(name="load_versions")
    async def load_versions(self, ask: EngineLoad) -> EngineReport:
        self.loads += 1
        await self.gate.wait()
        if self.fails:
            raise self.fails.pop(0)
        return self.has.model_copy(update={"versions": [*self.has.versions, *self.has.missing], "missing": []})

    @activity.defn(name="unload_versions")
    async def unload_versions(self, ask: EngineUnload) -> EngineReport:
        self.unloads += 1
        return self.has.model_copy(update={"leaving": []})


@asynccontextmanager
async def at_work(client: Client, agent: ScriptedAgent) -> AsyncIterator[WorkflowHandle[EngineWorkflow, None]]:
    notifier = TemporalNotifier(client, IDLE)
    async with (
        Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[EngineWorkflow]),
        Worker(
            client,
            task_queue=names.engine_queue(agent.engine_id),
            activities=[agent.watch_engine, agent.load_versions, agent.unload_versions],
        ),
    ):
        await notifier.notify(EngineAdded(agent.engine_id))
        handle = client.get_workflow_handle_for(EngineWorkflow.run, names.engine_workflow_id(agent.engine_id))
        try:
            await until(lambda: len(agent.watched) >= 2)
            yield handle
        finally:
            with suppress(RPCError):  # it has ended
                await handle.terminate("the test is over")
            agent.gate.set()
            agent.changed.set()


async def details(handle: WorkflowHandle[EngineWorkflow, None], word: str) -> str:
    """What the UI shows, once this word is in it."""
    async with asyncio.timeout(30):
        while True:
            shown = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
            current: str = shown.current_details
            if word in current:
                return current
            await asyncio.sleep(0.05)
