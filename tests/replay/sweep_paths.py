"""The path through the sweep's workflow whose history is kept."""

from __future__ import annotations

from temporalio import activity
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Worker

from activities.sweep import Swept
from workflows import names
from workflows.sweep import SweepWorkflow


@activity.defn(name="sweep")
async def finds_nothing() -> Swept:
    counts = dict.fromkeys(Swept.model_fields, 0)
    return Swept(**counts)


async def swept(client: Client) -> WorkflowHistory:
    """One sweep."""
    async with (
        Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SweepWorkflow]),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=[finds_nothing]),
    ):
        sweep = await client.start_workflow(names.SWEEP_WORKFLOW, id=names.SWEEP_ID, task_queue=names.WORKFLOW_QUEUE)
        await sweep.result()
        return await sweep.fetch_history()


PATHS = (swept,)
