"""Whether an environment has a worker, asked of Temporal: workers have no rows in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from clawloop.episodes.messages import environment_queue
from clawloop.ids import RolloutGroupId
from clawloop.temporal.deadline import temporal_deadline
from workflows import names

_IN_A_SANDBOX = ("run_episode", "verify_episode")


class TemporalEnvironmentWorkers:
    """Satisfies `clawloop.operations.ports.EnvironmentWorkers`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def asks_for_work(self, environment: str) -> bool:
        """Whether a worker polled the environment's queue; Temporal forgets one five minutes after its last poll.

        Raises:
            SignalFailed
        """
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=environment_queue(environment)),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
        async with temporal_deadline():
            found = await self._client.workflow_service.describe_task_queue(request)
        return bool(found.pollers)

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        """
        Raises:
            SignalFailed
        """
        async with temporal_deadline():
            for group in groups:
                if await self._runs(group):
                    return True
        return False

    async def _runs(self, group: RolloutGroupId) -> bool:
        workflow = self._client.get_workflow_handle(names.rollout_group_workflow_id(group))
        try:
            found = await workflow.describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False  # it is started by the next look
            raise
        return any(
            activity.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
            and activity.activity_type.name in _IN_A_SANDBOX
            for activity in found.raw_description.pending_activities
        )
