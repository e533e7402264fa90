"""Recovery in Temporal: registers what is missing, lists and ends sessions, starts training and a sweep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, ScheduleOverlapPolicy, WorkflowExecution
from temporalio.service import RPCError

from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.server import PREPARE_LIMIT, prepare_namespace, temporal_deadline
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import RejudgeRequested, SessionFacts, ToldTurns, TurnRecorded
from clawloop.core.errors import SignalFailed
from clawloop.core.ids import SessionId, TurnId
from workflows import names
from workflows.state import SessionState

_SESSION_PREFIX = names.session_workflow_id(SessionId(UUID(int=0))).removesuffix(str(UUID(int=0)))
# Histories that are read, and workflows that are ended: a session's takes some milliseconds.
_AT_ONCE = 16
# Time limit for reading one history, which may have thousands of events, while others are read.
_HISTORY_LIMIT = timedelta(seconds=60)


class TemporalRecovery:
    """Satisfies `clawloop.app.processes.recovery.RecoveryWorkflows`.

    Args:
        notifier: of the same client.
    """

    def __init__(self, client: Client, notifier: TemporalNotifier) -> None:
        self._client = client
        self._notifier = notifier

    async def prepare(self) -> None:
        async with temporal_deadline(PREPARE_LIMIT):
            await prepare_namespace(self._client)

    async def shown_version(self, policy: str) -> int | None:
        handle = self._client.get_workflow_handle(names.training_workflow_id(policy))
        async with temporal_deadline(may_be_gone=True):
            return (await handle.describe()).typed_search_attributes.get(names.VERSION)
        return None

    async def restart_training(self, policy: str) -> None:
        await self._notifier.restart_training(policy)

    async def end_sessions(self) -> None:
        running = f"WorkflowType = '{names.SESSION_WORKFLOW}' AND ExecutionStatus = 'Running'"
        async for batch in self._listed(running):
            await asyncio.gather(*map(self._end, batch))

    async def _end(self, run: WorkflowExecution) -> None:
        # End the newest run: the list lags behind, and a run that continued as new has the turns of the one before.
        handle = self._client.get_workflow_handle(run.id)
        async with temporal_deadline(may_be_gone=True):
            await handle.terminate("clawloop recover: what waits for it is signalled to a new run")

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None:
        await self._notifier.notify(SessionNotice(session, request))

    async def sweep(self) -> None:
        async with temporal_deadline():
            await self._client.get_schedule_handle(names.SWEEP_ID).trigger(overlap=ScheduleOverlapPolicy.BUFFER_ONE)

    async def sessions(self) -> AsyncIterator[ToldTurns]:
        async for batch in self._listed(f"WorkflowType = '{names.SESSION_WORKFLOW}'"):
            for told in await asyncio.gather(*map(self._told, batch)):
                yield told

    async def _listed(self, query: str) -> AsyncIterator[list[WorkflowExecution]]:
        """The runs that a query finds, some at a time.

        Raises:
            SignalFailed
        """
        batch: list[WorkflowExecution] = []
        try:
            async for execution in self._client.list_workflows(query):
                batch.append(execution)
                if len(batch) == _AT_ONCE:
                    yield batch
                    batch = []
        except (RPCError, RuntimeError) as error:
            raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error
        yield batch

    async def _told(self, run: WorkflowExecution) -> ToldTurns:
        """Turns that a session's workflow was told, read from the run's history, which needs no worker."""
        handle = self._client.get_workflow_handle(run.id, run_id=run.run_id)
        turns: set[TurnId] = set()
        async with temporal_deadline(_HISTORY_LIMIT, may_be_gone=True):
            async for event in handle.fetch_history_events():
                turns |= await self._turns_of(event)
        return ToldTurns(SessionId(UUID(run.id.removeprefix(_SESSION_PREFIX))), frozenset(turns))

    async def _turns_of(self, event: HistoryEvent) -> set[TurnId]:
        decode = self._client.data_converter.decode
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED:
            started = event.workflow_execution_started_event_attributes
            (state,) = await decode(started.input.payloads, [SessionState])
            return {*state.known, *(message.turn_id for message in state.carried)}
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED:
            signalled = event.workflow_execution_signaled_event_attributes
            if signalled.signal_name == names.TURN_RECORDED:
                (recorded,) = await decode(signalled.input.payloads, [TurnRecorded])
                return {recorded.turn_id}
        return set()
