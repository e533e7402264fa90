"""Notifies the workflows of rollouts. Idempotent and best effort: they decide by PostgreSQL."""

from __future__ import annotations

from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDConflictPolicy

from clawloop.temporal.deadline import temporal_deadline
from workflows import names
from workflows.page_links import NO_PAGE
from workflows.state import PolicyRollouts


class TemporalRolloutsNotifier:
    """Satisfies `clawloop.operations.ports.RolloutsNotifier`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def rollouts_changed(self, policy: str) -> None:
        """Signal the workflow, and start it if it does not run.

        Raises:
            SignalFailed
        """
        async with temporal_deadline():
            await self._client.start_workflow(
                names.ROLLOUTS_WORKFLOW,
                PolicyRollouts(policy=policy),
                id=names.rollouts_workflow_id(policy),
                task_queue=names.WORKFLOW_QUEUE,
                start_signal=names.ROLLOUTS_CHANGED,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                search_attributes=TypedSearchAttributes([SearchAttributePair(names.POLICY, policy)]),
                static_details=NO_PAGE.of_rollouts(policy),
                static_summary=f"{policy}: rollouts",
            )
