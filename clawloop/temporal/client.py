"""Temporal as all processes use it: one plugin for every client, and what notifies sessions' workflows.

The plugin is given to clients only; workers and replayers inherit it, so that all use the same data converter.
"""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Self, cast

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
    ScheduleUpdate,
    ScheduleUpdateInput,
)
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.service import PayloadLimitsConfig
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    UnsandboxedWorkflowRunner,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from clawloop.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnRecorded
from clawloop.errors import (
    ClawloopError,
    EncryptionKeyMissing,
    JudgeRefused,
    JudgeUnavailable,
    PermanentError,
    SandboxFailed,
    TrainerUnavailable,
)
from clawloop.ids import SessionId
from clawloop.telemetry.tracing import tracer
from clawloop.temporal.deadline import temporal_deadline
from workflows import names
from workflows.page_links import NO_PAGE, PageLinks
from workflows.state import SessionState

log = logging.getLogger(__name__)

PAYLOAD_WARN_BYTES = 64 * 1024
"""Only ids, scores and reasons cross Temporal; anything larger is a mistake of ours."""

# A turn whose signal failed is judged this much later at most.
SWEEP_EVERY = timedelta(minutes=1)
# One sweep finds everything that missed ones would have. By default Temporal replays each run missed in a year, in one
# workflow task, which grows with the time the server was off.
SWEEP_CATCH_UP = timedelta(minutes=2)
# An activity beats at half its time-out; by default the SDK holds beats back for 0.8 of it (measured), and then a busy
# machine that is late by a fifth loses the work.
BEATS_APART = timedelta(seconds=0.5)

# Passed through the sandbox: each module holds only definitions and constants, so two runs may share it.
PASSED_THROUGH = (
    "pydantic",  # compiled validators; importing it for every workflow run costs 300 ms
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "uuid6",  # imported by clawloop.ids; workflows make no ids
    "orjson",  # imported by clawloop.turns; pure, compiled
    "clawloop",  # contracts, ids, errors and the pure rules: frozen records and functions
    "activities",  # workflows need names and signatures only
    "workflows.names",
    "workflows.activity_options",
    "workflows.state",  # pydantic models; a run never shares an instance with another
)


def _runner(sandboxed: bool) -> WorkflowRunner:
    if not sandboxed:
        return UnsandboxedWorkflowRunner()
    restrictions = SandboxRestrictions.default.with_passthrough_modules(*PASSED_THROUGH)
    return SandboxedWorkflowRunner(restrictions)


_SAFE = JudgeUnavailable | JudgeRefused | TrainerUnavailable | SandboxFailed | EncryptionKeyMissing


class _RedactErrors(ActivityInboundInterceptor):
    """Replaces the message of an activity's error by its type before it crosses Temporal.

    A message may quote a conversation (PostgreSQL quotes the row it refuses), so it stays in our logs. Messages of
    judges, trainers and missing keys are safe by contract, and operators need them.
    """

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        try:
            return await super().execute_activity(input)
        except ApplicationError:
            raise
        except Exception as error:  # noqa: BLE001  no message of any error may cross
            kind = type(error).__name__
            is_safe = isinstance(error, _SAFE)
            log.warning(
                "activity failed",
                extra={"error": kind, "where": _where(error), "why": str(error) if is_safe else None},
            )
            wait = error.retry_after_seconds if isinstance(error, JudgeUnavailable) else None
            raise ApplicationError(
                str(error) if is_safe else kind,
                type=kind,
                non_retryable=isinstance(error, PermanentError),
                next_retry_delay=None if wait is None else timedelta(seconds=wait),
            ) from None


class _RedactErrorsInterceptor(Interceptor):
    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _RedactErrors(next)


def _tracing() -> list[Interceptor]:
    """What makes spans of signals, workflows and activities, outside of what redacts errors; nothing by default."""
    if (own := tracer()) is None:
        return []
    from temporalio.contrib.opentelemetry import TracingInterceptor

    return [TracingInterceptor(own)]


def _where(error: BaseException) -> str:
    """The innermost frames of the traceback, without the message."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))


class _SharedPayloadConverter(PydanticPayloadConverter):
    """The SDK makes a converter for each workflow run, and one that is new compiles each type's validator again."""

    _shared: ClassVar[PydanticPayloadConverter | None] = None

    def __new__(cls) -> Self:
        if cls._shared is None:
            made = cls._shared = super().__new__(cls)
            PydanticPayloadConverter.__init__(made)
        return cast(Self, cls._shared)

    def __init__(self) -> None:
        """Nothing: `__new__` has done it, once."""


class ClawloopPlugin(SimplePlugin):
    """Pydantic payloads, which errors fail a workflow, what of them crosses, what the sandbox lets through, beats.

    Args:
        sandboxed: workflows run in the SDK's sandbox, which refuses what differs from run to run: clocks, random
            numbers, files. It imports a workflow's module for each run, half of a busy orchestrator's CPU, so only
            replays use it: of the saved histories in the tests, and of open workflows by `clawloop check replay`.
    """

    def __init__(self, *, sandboxed: bool = False) -> None:
        super().__init__(
            "clawloop",
            data_converter=DataConverter(payload_converter_class=_SharedPayloadConverter),
            workflow_runner=_runner(sandboxed),
            interceptors=[*_tracing(), _RedactErrorsInterceptor()],
            # Anything else is a bug: the workflow waits until it is mended, and goes on.
            workflow_failure_exception_types=[ClawloopError],
        )

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Each beat goes out as it comes."""
        config["max_heartbeat_throttle_interval"] = BEATS_APART
        return super().configure_worker(config)


async def connect(address: str, *, lazy: bool = False) -> Client:
    """A client; namespace, TLS and API key are read where Temporal's own tools read them.

    Args:
        lazy: connect at the first call, and at each further call after a failure.

    Raises:
        RuntimeError: nothing answers there; not if `lazy`.
    """
    config = ClientConfig.load_client_connect_config()
    config["target_host"] = address
    limits = PayloadLimitsConfig(payloads_warn_size=PAYLOAD_WARN_BYTES)
    return await Client.connect(**config, plugins=[ClawloopPlugin()], payload_limits=limits, lazy=lazy)


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
        await client.get_schedule_handle(names.SWEEP_ID).update(_with_catch_up)


def _with_catch_up(existing: ScheduleUpdateInput) -> ScheduleUpdate:
    # Schedules of version 0.1.0 catch up for a year.
    schedule = existing.description.schedule
    schedule.policy.catchup_window = SWEEP_CATCH_UP
    return ScheduleUpdate(schedule=schedule)


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
