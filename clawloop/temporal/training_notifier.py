"""Notifies training workflows of waiting batches and of operators' changes.

Idempotent and best effort: the workflows decide by PostgreSQL, which they read again by themselves.
"""

from __future__ import annotations

from typing import Any

from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDConflictPolicy

from clawloop.contracts.training import OperatorChange, TrainingState
from clawloop.temporal.deadline import UPDATE_LIMIT, temporal_deadline
from workflows import names
from workflows.page_links import NO_PAGE, PageLinks
from workflows.state import PolicyTraining


class TemporalTrainingNotifier:
    """Satisfies `activities.training.ports.WorkNotifier` and `clawloop.operations.ports.OperatorNotifier`.

    Args:
        client: may be lazy; it connects again by itself.
        if_running: what becomes of a workflow that runs.
        links: from Temporal's UI to the page.
    """

    def __init__(
        self,
        client: Client,
        if_running: WorkflowIDConflictPolicy = WorkflowIDConflictPolicy.USE_EXISTING,
        links: PageLinks = NO_PAGE,
    ) -> None:
        self._client = client
        self._links = links
        self._if_running = if_running

    async def notify_work(self, policy: str) -> None:
        """Wake the policy's workflow by signal-with-start, which needs Temporal's server, but no worker.

        Raises:
            SignalFailed
        """
        search_attributes: list[SearchAttributePair[Any]] = [
            SearchAttributePair(names.POLICY, policy),
            SearchAttributePair(names.STATE, str(TrainingState.WAITING)),
        ]
        async with temporal_deadline():
            await self._client.start_workflow(
                names.TRAINING_WORKFLOW,
                PolicyTraining(policy=policy),
                id=names.training_workflow_id(policy),
                task_queue=names.WORKFLOW_QUEUE,
                start_signal=names.WORK_WAITING,
                id_conflict_policy=self._if_running,
                search_attributes=TypedSearchAttributes(search_attributes),
                static_details=self._links.of_training(policy),
                static_summary=f"{policy}: steps and versions",
            )

    async def operator_changed(self, policy: str, change: OperatorChange) -> None:
        """Send the policy's workflow an update, which needs a worker.

        Raises:
            SignalFailed
        """
        handle = self._client.get_workflow_handle(names.training_workflow_id(policy))
        async with temporal_deadline(UPDATE_LIMIT):
            await handle.execute_update(names.OPERATOR_CHANGED, change)
