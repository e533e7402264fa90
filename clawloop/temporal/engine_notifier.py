"""Notifies engines' workflows of versions to load; starts and ends these workflows."""

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
from workflows.page_links import NO_PAGE, PageLinks
from workflows.state import EngineState


class TemporalEngineNotifier:
    """Satisfies `activities.serving.ports.PublishNotifier` and `EngineWorkflows`.

    Args:
        client: may be lazy; it connects again by itself.
    """

    def __init__(self, client: Client, links: PageLinks = NO_PAGE) -> None:
        self._client = client
        self._links = links

    async def publish(self, engine_ids: Sequence[str]) -> None:
        """
        Raises:
            SignalFailed: of at least one; the others were notified.
        """
        signals = (self._begin(engine_id, names.PUBLISH) for engine_id in engine_ids)
        for error in await asyncio.gather(*signals, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def begin(self, engine_id: str) -> None:
        """Start the engine's workflow if it does not run.

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
            executions = self._client.list_workflows(query)
            return frozenset([names.engine_of_workflow(execution.id) async for execution in executions])

    async def end(self, engine_id: str) -> None:
        """
        Raises:
            SignalFailed
        """
        handle = self._client.get_workflow_handle(names.engine_workflow_id(engine_id))
        async with temporal_deadline(may_be_gone=True):
            await handle.signal(names.ENGINE_REMOVED)

    async def _begin(self, engine_id: str, signal: str | None) -> None:
        search_attributes: list[SearchAttributePair[Any]] = [
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
                search_attributes=TypedSearchAttributes(search_attributes),
                static_details=self._links.of_engine(engine_id),
                static_summary=f"engine {engine_id}: the versions it has",
            )
