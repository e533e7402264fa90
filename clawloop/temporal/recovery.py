"""What recovery does in Temporal: registers what is missing, starts training again, lists sessions, starts a sweep."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID

from temporalio.client import Client, ScheduleOverlapPolicy
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError

from clawloop.contracts.sessions import RejudgeRequested, SessionFacts
from clawloop.errors import SignalFailed
from clawloop.ids import SessionId
from clawloop.temporal.client import PREPARE_LIMIT, TemporalSessionNotifier, prepare_namespace
from clawloop.temporal.deadline import temporal_deadline
from clawloop.temporal.training_notifier import TemporalTrainingNotifier
from workflows import names
from workflows.page_links import NO_PAGE, PageLinks


class TemporalRecovery:
    """Satisfies `clawloop.operations.recovery.RecoveryWorkflows`.

    Args:
        idle: a session closes after this long without a turn.
        links: from Temporal's UI to the page.
    """

    def __init__(self, client: Client, idle: timedelta, links: PageLinks = NO_PAGE) -> None:
        self._client = client
        self._links = links
        self._sessions = TemporalSessionNotifier(client, idle, links)

    async def prepare(self) -> None:
        async with temporal_deadline(PREPARE_LIMIT):
            await prepare_namespace(self._client)

    async def shown_version(self, policy: str) -> int | None:
        handle = self._client.get_workflow_handle(names.training_workflow_id(policy))
        async with temporal_deadline(may_be_gone=True):
            return (await handle.describe()).typed_search_attributes.get(names.VERSION)
        return None

    async def restart_training(self, policy: str) -> None:
        notifier = TemporalTrainingNotifier(self._client, WorkflowIDConflictPolicy.TERMINATE_EXISTING, self._links)
        await notifier.notify_work(policy)

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None:
        await self._sessions.rejudge(session, request)

    async def sweep(self) -> None:
        async with temporal_deadline():
            await self._client.get_schedule_handle(names.SWEEP_ID).trigger(overlap=ScheduleOverlapPolicy.BUFFER_ONE)

    async def sessions(self) -> AsyncIterator[SessionId]:
        prefix = names.session_workflow_id(SessionId(UUID(int=0))).removesuffix(str(UUID(int=0)))
        seen: set[str] = set()
        try:
            async for execution in self._client.list_workflows(f"WorkflowType = '{names.SESSION_WORKFLOW}'"):
                if execution.id not in seen:  # a session that was opened again has several runs
                    seen.add(execution.id)
                    yield SessionId(UUID(execution.id.removeprefix(prefix)))
        except (RPCError, RuntimeError) as error:
            raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error
