"""Notifies workflows in Temporal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_never

from pydantic import BaseModel
from temporalio.client import Client
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)

from clawloop.app.temporal.server import UPDATE_LIMIT, temporal_deadline
from clawloop.core.contracts.notices import (
    BatchWaits,
    EngineAdded,
    EngineRemoved,
    Notice,
    OperatorChanged,
    RolloutsChanged,
    SessionErased,
    SessionNotice,
    VersionToLoad,
)
from clawloop.core.contracts.sessions import FeedbackGiven, RejudgeRequested, TurnRecorded
from clawloop.core.contracts.training import TrainingState
from clawloop.core.settings import Settings
from workflows import names
from workflows.page_links import NO_PAGE, PageLinks
from workflows.state import EngineState, PolicyRollouts, PolicyTraining, SessionState

_SESSION_SIGNALS = {
    TurnRecorded: names.TURN_RECORDED,
    FeedbackGiven: names.FEEDBACK_GIVEN,
    RejudgeRequested: names.REJUDGE,
}


@dataclass(frozen=True, slots=True)
class _Start:
    """A workflow to start, and what Temporal's UI says of it.

    Args:
        details: Markdown.
        summary: one line.
    """

    workflow: str
    id: str
    state: BaseModel
    search_attributes: list[SearchAttributePair[Any]]
    details: str
    summary: str


class TemporalNotifier:
    """Satisfies `clawloop.core.contracts.notices.Notifier`.

    Most notices are a signal-with-start, which needs Temporal's server, but no worker.

    Args:
        client: may be lazy; it connects again by itself.
        idle: a session closes after this long without a turn.
        links: from Temporal's UI to the page.
    """

    @classmethod
    def of(cls, client: Client, settings: Settings) -> TemporalNotifier:
        """The notifier of a process; CLAWLOOP_PAGE, which `clawloop up` sets, gives links to the page."""
        return cls(client, timedelta(minutes=settings.session_idle_minutes), PageLinks(settings.page))

    def __init__(self, client: Client, idle: timedelta, links: PageLinks = NO_PAGE) -> None:
        self._client = client
        self._idle = idle
        self._links = links

    async def notify(self, notice: Notice) -> None:
        """
        Raises:
            SignalFailed
        """
        match notice:
            case SessionNotice(_, None):
                await self._start(self._session(notice), None)
            case SessionNotice(_, message):
                await self._start(self._session(notice), _SESSION_SIGNALS[type(message)], message)
            case BatchWaits(policy):
                await self._start(self._training(policy), names.WORK_WAITING)
            case RolloutsChanged(policy):
                await self._start(self._rollouts(policy), names.ROLLOUTS_CHANGED)
            case EngineAdded(engine_id):
                await self._start(self._engine(engine_id), None)
            case VersionToLoad(engine_id):
                await self._start(self._engine(engine_id), names.PUBLISH)
            case SessionErased(session, erased):
                await self._signal_if_running(names.session_workflow_id(session), names.CONTENT_ERASED, erased)
            case EngineRemoved(engine_id):
                await self._signal_if_running(names.engine_workflow_id(engine_id), names.ENGINE_REMOVED)
            case OperatorChanged(policy, change):
                handle = self._client.get_workflow_handle(names.training_workflow_id(policy))
                async with temporal_deadline(UPDATE_LIMIT):
                    await handle.execute_update(names.OPERATOR_CHANGED, change)
            case _:
                assert_never(notice)

    async def restart_training(self, policy: str) -> None:
        """End the policy's training workflow, if it runs, and start it again, in one call: nothing can end between.

        Raises:
            SignalFailed
        """
        await self._start(self._training(policy), None, in_place_of_running=True)

    async def running_engines(self) -> frozenset[str]:
        """Engines with a running workflow, as indexed by Temporal, at most seconds late.

        Raises:
            SignalFailed
        """
        query = f"WorkflowType = '{names.ENGINE_WORKFLOW}' AND ExecutionStatus = 'Running'"
        async with temporal_deadline():
            executions = self._client.list_workflows(query)
            return frozenset([names.engine_of_workflow(execution.id) async for execution in executions])

    async def _start(
        self, start: _Start, signal: str | None, *message: object, in_place_of_running: bool = False
    ) -> None:
        conflict = WorkflowIDConflictPolicy
        async with temporal_deadline():
            await self._client.start_workflow(
                start.workflow,
                start.state,
                id=start.id,
                task_queue=names.WORKFLOW_QUEUE,
                start_signal=signal,
                start_signal_args=message,
                # A closed session, or an engine that was removed, starts again under the same id.
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                # Without a signal the server would refuse to start one that runs already.
                id_conflict_policy=conflict.TERMINATE_EXISTING if in_place_of_running else conflict.USE_EXISTING,
                search_attributes=TypedSearchAttributes(start.search_attributes),
                static_details=start.details,
                static_summary=start.summary,
            )

    async def _signal_if_running(self, workflow_id: str, signal: str, *message: object) -> None:
        async with temporal_deadline(may_be_gone=True):
            await self._client.get_workflow_handle(workflow_id).signal(signal, args=message)

    def _session(self, notice: SessionNotice) -> _Start:
        session = notice.session
        state = SessionState(
            session_id=session.session_id,
            policy=session.policy,
            idle_seconds=self._idle.total_seconds(),
            adapter_version=session.version,
        )
        since = f"{session.since:%Y-%m-%d %H:%M} UTC"
        return _Start(
            names.SESSION_WORKFLOW,
            names.session_workflow_id(session.session_id),
            state,
            [
                SearchAttributePair(names.POLICY, session.policy),
                SearchAttributePair(names.SESSION, str(session.session_id)),
                SearchAttributePair(names.STATE, "open"),
                SearchAttributePair(names.VERSION, session.version),
            ],
            details=self._links.of_session(session.policy, session.session_id),
            summary=f"{session.policy}: session known by {session.identified_by}, open since {since}",
        )

    def _training(self, policy: str) -> _Start:
        return _Start(
            names.TRAINING_WORKFLOW,
            names.training_workflow_id(policy),
            PolicyTraining(policy=policy),
            [
                SearchAttributePair(names.POLICY, policy),
                SearchAttributePair(names.STATE, str(TrainingState.WAITING)),
            ],
            details=self._links.of_training(policy),
            summary=f"{policy}: steps and versions",
        )

    def _rollouts(self, policy: str) -> _Start:
        return _Start(
            names.ROLLOUTS_WORKFLOW,
            names.rollouts_workflow_id(policy),
            PolicyRollouts(policy=policy),
            [SearchAttributePair(names.POLICY, policy)],
            details=self._links.of_rollouts(policy),
            summary=f"{policy}: rollouts",
        )

    def _engine(self, engine_id: str) -> _Start:
        return _Start(
            names.ENGINE_WORKFLOW,
            names.engine_workflow_id(engine_id),
            EngineState(engine_id=engine_id),
            [SearchAttributePair(names.ENGINE, engine_id), SearchAttributePair(names.STATE, "new")],
            details=self._links.of_engine(engine_id),
            summary=f"engine {engine_id}: the versions it has",
        )
