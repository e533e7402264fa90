"""Prepares a namespace of the Temporal server: search attributes, and the schedule of the sweep."""

from __future__ import annotations

from datetime import timedelta

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
)

from workflows import names

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
