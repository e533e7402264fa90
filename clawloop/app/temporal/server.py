"""A Temporal server: time limits of calls, whether it answers, its namespace, which workers it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio.api.enums.v1 import IndexedValueType, PendingActivityState, TaskQueueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from clawloop.core.episodes.running import environment_queue
from clawloop.core.errors import SignalFailed
from clawloop.core.ids import RolloutGroupId
from clawloop.operations.overview import NO_TEMPORAL
from workflows import names

# Time limits ----------------------------------------------------------------------------------------------------------
# A time limit for calls of Temporal; however they fail, they raise one error.

# A signal takes 10 ms; a server that needs longer than this counts as away, and the sweep retries.
SIGNAL_LIMIT = timedelta(seconds=3)
# An update needs a worker, and takes 20 ms where one runs. An operator's command must not wait for one that does not.
UPDATE_LIMIT = timedelta(seconds=2)


@asynccontextmanager
async def temporal_deadline(limit: timedelta | None = None, *, may_be_gone: bool = False) -> AsyncIterator[None]:
    """Limit the calls of Temporal in the block.

    A call's `rpc_timeout` does not apply while a lazy client connects: where a server accepts the connection and never
    answers, the SDK waits for 30 s.

    Args:
        limit: of all calls in the block; None: SIGNAL_LIMIT.
        may_be_gone: ignore that the workflow does not exist.

    Raises:
        SignalFailed: Temporal does not answer in time, refuses, or cannot be connected to.
    """
    limit = SIGNAL_LIMIT if limit is None else limit
    try:
        async with asyncio.timeout(limit.total_seconds()):
            yield
    except TimeoutError as error:
        raise SignalFailed(f"Temporal: no answer within {limit.total_seconds():g} s") from error
    except (RPCError, RuntimeError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        if may_be_gone and isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
            return
        raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error


# Whether it answers ---------------------------------------------------------------------------------------------------
# Whether Temporal answers, asked every few seconds and told to people; nothing is decided by it.

# A person who looks sees an outage, and its end, within seconds; a call costs a millisecond.
EVERY_SECONDS = 5.0
_ASKING = timedelta(seconds=3)
AWAY = "Temporal does not answer: chats go on and are recorded; judging and training wait until it is back"


class TemporalWatch:
    """Use as an async context manager.

    Args:
        client: may be lazy; None: none is configured.
    """

    def __init__(self, client: Client | None, every_seconds: float = EVERY_SECONDS) -> None:
        self._client = client
        self._every_seconds = every_seconds
        self._answers = True  # until the first answer, or its absence, says something else
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TemporalWatch:
        if self._client is not None:
            self._asking = asyncio.create_task(self._ask_again_and_again(self._client))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    @property
    def known_problem(self) -> str | None:
        if self._client is None:
            return NO_TEMPORAL
        return None if self._answers else AWAY

    async def problem(self) -> str | None:
        return self.known_problem

    async def _ask_again_and_again(self, client: Client) -> None:
        while True:
            try:
                async with temporal_deadline(_ASKING):
                    await client.service_client.check_health()
                self._answers = True
            except SignalFailed:
                self._answers = False
            await asyncio.sleep(self._every_seconds)


# Namespace ------------------------------------------------------------------------------------------------------------
# Prepares a namespace of the Temporal server: search attributes, and the schedule of the sweep.

# A turn whose signal failed is judged this much later at most.
SWEEP_EVERY = timedelta(minutes=1)
# One sweep finds everything that missed ones would have. By default Temporal replays each run missed in a year, in one
# workflow task, which grows with the time the server was off.
SWEEP_CATCH_UP = timedelta(minutes=2)


# A server that has just started with an empty database answers the first calls late.
PREPARE_LIMIT = timedelta(seconds=30)


async def prepare_namespace(client: Client) -> None:
    """Register what every namespace needs: search attributes and the sweep's schedule. Idempotent.

    Raises:
        RPCError: the server refuses.
    """
    await register_search_attributes(client)
    await begin_sweeping(client)


async def register_search_attributes(client: Client) -> None:
    """Register the search attributes that are missing.

    Raises:
        RPCError: the server refuses.
    """
    registered = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    missing = {key.name: key.indexed_value_type for key in names.SEARCH_ATTRIBUTES}
    missing = {name: kind for name, kind in missing.items() if name not in registered.custom_attributes}
    if missing:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=client.namespace,
                search_attributes={name: IndexedValueType.ValueType(kind) for name, kind in missing.items()},
            )
        )


async def begin_sweeping(client: Client) -> None:
    """Create the schedule that starts the sweep every minute. Idempotent; a paused schedule stays paused.

    Raises:
        RPCError: the server refuses.
    """
    sweep = ScheduleActionStartWorkflow(
        names.SWEEP_WORKFLOW,
        id=names.SWEEP_ID,
        task_queue=names.WORKFLOW_QUEUE,
        execution_timeout=timedelta(minutes=30),
    )
    schedule = Schedule(
        action=sweep,
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=SWEEP_EVERY)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=SWEEP_CATCH_UP),
    )
    try:
        await client.create_schedule(names.SWEEP_ID, schedule)
    except ScheduleAlreadyRunningError:
        return


# Workers of environments ----------------------------------------------------------------------------------------------
# Whether an environment has a worker, asked of Temporal: workers have no rows in PostgreSQL.

_IN_A_SANDBOX = ("run_episode", "verify_episode")


class TemporalEnvironmentWorkers:
    """Satisfies `clawloop.operations.rollouts.EnvironmentWorkers`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def asks_for_work(self, environment: str) -> bool:
        """True if a worker polled the environment's queue; Temporal forgets a worker five minutes after its last poll.

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
