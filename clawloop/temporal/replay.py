"""Replays the histories of open workflows on this version's code: whether workers of this version can continue them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from temporalio.client import Client, WorkflowHistory
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Replayer

from clawloop.errors import SignalFailed
from clawloop.temporal.plugin import ClawloopPlugin
from workflows.registered import WORKFLOWS

# The SDK prints a whole protocol message around it.
_MESSAGE = re.compile(r'message: "(.+?)", source: ')


@dataclass(frozen=True, slots=True)
class Replay:
    """
    Args:
        problem: why this code cannot continue the workflow; None if it can.
    """

    workflow_id: str
    workflow_type: str
    events: int
    problem: str | None


async def replay_open_workflows(client: Client) -> AsyncIterator[Replay]:
    """Replay each running workflow; only reads.

    Raises:
        SignalFailed: Temporal does not answer.
    """
    try:
        async for execution in client.list_workflows("ExecutionStatus = 'Running'"):
            handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
            try:
                history = await handle.fetch_history()
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    continue  # it was deleted meanwhile
                raise
            problem = await replay(history)
            yield Replay(execution.id, execution.workflow_type, len(history.events), problem)
    except (RPCError, RuntimeError) as error:
        raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error


async def replay(history: WorkflowHistory) -> str | None:
    """Why this code cannot continue the workflow of this history; None if it can."""
    replayer = Replayer(workflows=WORKFLOWS, plugins=[ClawloopPlugin(sandboxed=True)])
    result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
    if result.replay_failure is None:
        return None
    text = " ".join(str(result.replay_failure).split())
    quoted = _MESSAGE.search(text)
    return text if quoted is None else quoted[1]
