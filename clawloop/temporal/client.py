"""What notifies sessions' workflows, and what an orchestrator prepares at the Temporal server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

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
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)

from clawloop.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnRecorded
from clawloop.ids import SessionId
from clawloop.temporal.deadline import temporal_deadline
from workflows import names
from workflows.page_links import NO_PAGE, PageLinks
from workflows.state import SessionState

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


class TemporalSessionNotifier:
    """Notifies sessions' workflows by signal-with-start, which needs Temporal's server, but no worker.

    Satisfies `api.ports.SessionNotifier`, `activities.sweep.SessionNotifier` and
    `clawloop.operations.ports.SessionWorkflows`.

    Args:
        client: may be lazy; it connects again by itself.
        idle: a session closes after this long without a turn.
        links: from Temporal's UI to the page.
    """

    def __init__(self, client: Client, idle: timedelta, links: PageLinks = NO_PAGE) -> None:
        self._client = client
        self._idle = idle
        self._links = links

    async def notify_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._signal(session, names.TURN_RECORDED, turn)

    async def notify_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        """
        Raises:
            SignalFailed
        """
        await self._signal(session, names.FEEDBACK_GIVEN, feedback)

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None:
        """Have the session's workflow judge a turn again.

        Raises:
            SignalFailed
        """
        await self._signal(session, names.REJUDGE, request)

    async def content_erased(self, session: SessionId, erased: ContentErased) -> None:
        """Notify the session's workflow, if one runs.

        Raises:
            SignalFailed
        """
        workflow = self._client.get_workflow_handle(names.session_workflow_id(session))
        async with temporal_deadline(may_be_gone=True):
            await workflow.signal(names.CONTENT_ERASED, erased)

    async def wake(self, session: SessionFacts) -> None:
        """Start the session's workflow if it does not run, so that it closes.

        Raises:
            SignalFailed
        """
        await self._signal(session, None, None)

    async def _signal(
        self, session: SessionFacts, signal: str | None, message: TurnRecorded | FeedbackGiven | RejudgeRequested | None
    ) -> None:
        state = SessionState(
            session_id=session.session_id,
            policy=session.policy,
            idle_seconds=self._idle.total_seconds(),
            adapter_version=session.version,
        )
        search_attributes: list[SearchAttributePair[Any]] = [
            SearchAttributePair(names.POLICY, session.policy),
            SearchAttributePair(names.SESSION, str(session.session_id)),
            SearchAttributePair(names.STATE, "open"),
            SearchAttributePair(names.VERSION, session.version),
        ]
        since = f"{session.since:%Y-%m-%d %H:%M} UTC"
        async with temporal_deadline():
            await self._client.start_workflow(
                names.SESSION_WORKFLOW,
                state,
                id=names.session_workflow_id(session.session_id),
                task_queue=names.WORKFLOW_QUEUE,
                start_signal=signal,
                start_signal_args=[] if message is None else [message],
                # A closed session opens again under the same id.
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                # Without a signal the server would refuse to start one that runs already.
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                search_attributes=TypedSearchAttributes(search_attributes),
                static_details=self._links.of_session(session.policy, session.session_id),
                static_summary=f"{session.policy}: session known by {session.identified_by}, open since {since}",
            )
