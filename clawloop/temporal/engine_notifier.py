"""What tells engines' workflows in Temporal that there is a version to load, and sees that they run.

Knows nothing about versions: the workflow looks by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from temporalio.client import Client
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)

from clawloop.temporal.deadline import temporal_deadline
from workflows import names
from workflows.state import EngineState


class TemporalEngineNotifier:
    """Satisfies `activities.serving.ports.PublishNotifier` and `.EngineWorkflows`.

    Args:
        client: may be lazy; it connects again by itself.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def publish(self, engine_ids: Sequence[str]) -> None:
        """
        Raises:
            SignalFailed: of one at least; the others were told.
        """
        told = await asyncio.gather(*(self._begin(one, names.PUBLISH) for one in engine_ids), return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException):
                raise error

    async def begin(self, engine_id: str) -> None:
        """See that the engine's workflow runs.

        Raises:
            SignalFailed
        """
        await self._begin(engine_id, None)

    async def running(self) -> frozenset[str]:
        """
        Raises:
            SignalFailed
        """
        query = f"WorkflowType = '{names.ENGINE_WORKFLOW}' AND ExecutionStatus = 'Running'"
        async with temporal_deadline():
            found = self._client.list_workflows(query)
            return frozenset([names.engine_of_workflow(execution.id) async for execution in found])

    async def end(self, engine_id: str) -> None:
        """
        Raises:
            SignalFailed
        """
        handle = self._client.get_workflow_handle(names.engine_workflow_id(engine_id))
        async with temporal_deadline(may_be_gone=True):
            await handle.signal(names.ENGINE_REMOVED)

    async def _begin(self, engine_id: str, signal: str | None) -> None:
        found_by: list[SearchAttributePair[Any]] = [
            SearchAttributePair(names.ENGINE, engine_id),
            SearchAttributePair(names.STATE, "new"),
        ]
        async with temporal_deadline():
            await self._client.start_workflow(
                names.ENGINE_WORKFLOW,
                EngineState(engine_id=engine_id),
                id=names.engine_workflow_id(engine_id),
                task_queue=names.WORKFLOW_QUEUE,
                start_signal=signal,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                search_attributes=TypedSearchAttributes(found_by),
                static_summary=f"engine {engine_id}: the versions it has",
            )
