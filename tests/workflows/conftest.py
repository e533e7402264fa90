"""Session workflows on Temporal's real development server, with activities that are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.judging.closing import Closed, CloseSession
from activities.judging.judge_turn import CollectDirectVote, Judged, JudgeTurn, JudgeTurns
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import register_search_attributes
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import SessionFacts, TurnRecorded, TurnResult
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import SessionId, TurnId, new_turn_id
from workflows import names
from workflows.page_links import PageLinks
from workflows.session import SessionWorkflow
from workflows.state import SessionState, SessionSummary

IDLE = timedelta(minutes=30)
SHORT_PAUSES = (timedelta(milliseconds=20), timedelta(milliseconds=50))
SessionHandle = WorkflowHandle[SessionWorkflow, SessionSummary]


@pytest.fixture(scope="session")
async def client(temporal_address: str) -> Client:
    connected = await connect(temporal_address)
    await register_search_attributes(connected)
    return connected


class ScriptedActivities:
    """Stands in for judging and the ledger.

    Attributes:
        judged: requests, in the order in which they began; each of several turns judged together is one.
        together: requests for several turns.
        runs: the session of each judging activity, in the order in which they began.
        most: the largest number of concurrent judgings.
        fails: how a judging fails; called with each request.
        gate: judging waits for it.
        missed: turns that a closing finds without a judgement, one list for each closing.
        open_after_all: a closing finds the session open that was to be closed again.
        tied: turns that a closing finds with votes that cancel out; asked_directly: turns with a direct vote.
    """

    def __init__(self) -> None:
        self.judged: list[JudgeTurn] = []
        self.together: list[JudgeTurns] = []
        self.runs: list[SessionId] = []
        self.closed: list[CloseSession] = []
        self.now = 0
        self.most = 0
        self.seconds = 0.0
        self.fails: Callable[[JudgeTurn], ApplicationError | None] = lambda ask: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.missed: list[list[TurnId]] = []
        self.open_after_all = False
        self.tied: list[TurnId] = []
        self.asked_directly: list[TurnId] = []

    @activity.defn(name="judge_turn")
    async def judge_turn(self, ask: JudgeTurn) -> Judged:
        self.runs.append(ask.session_id)
        return Judged(results=[await self._judge(ask)])

    @activity.defn(name="judge_turns")
    async def judge_turns(self, ask: JudgeTurns) -> Judged:
        self.runs.append(ask.session_id)
        self.together.append(ask)
        return Judged(results=await asyncio.gather(*map(self._judge, ask.single())))

    async def _judge(self, ask: JudgeTurn) -> TurnResult:
        self.judged.append(ask)
        number = len(self.judged)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            await asyncio.sleep(self.seconds)
            if (error := self.fails(ask)) is not None:
                raise error
        finally:
            self.now -= 1
        why = "verdict good: 3 of 3 votes good" if ask.give_up is None else f"no valid vote ({ask.give_up})"
        outcome = TurnOutcome.SAMPLED if ask.give_up is None else TurnOutcome.UNJUDGED
        return turn_result(ask.turn_id, number, outcome, why)

    @activity.defn(name="collect_direct_vote")
    async def collect_direct_vote(self, ask: CollectDirectVote) -> None:
        self.asked_directly.append(ask.turn_id)
        if (error := self.fails(JudgeTurn(session_id=ask.session_id, turn_id=ask.turn_id))) is not None:
            raise error

    @activity.defn(name="close_session")
    async def close_session(self, ask: CloseSession) -> Closed:
        self.closed.append(ask)
        if ask.again and self.open_after_all:
            return Closed(to_judge=[], results=[], still_open=True)
        missed = self.missed.pop(0) if self.missed else []
        if missed and not ask.give_up:
            return Closed(to_judge=missed, results=[])
        if self.tied and not ask.asked_directly:
            return Closed(to_judge=[], to_ask=self.tied, results=[])
        return Closed(to_judge=[], results=[], guarantee="has a sample", turns=len(self.judged))


def turn_result(turn_id: TurnId, number: int, outcome: TurnOutcome, why: str) -> TurnResult:
    sampled = outcome is TurnOutcome.SAMPLED
    return TurnResult(
        turn_id=turn_id,
        number=number,
        kind="main",
        outcome=outcome,
        verdict=1 if sampled else None,
        sample=sampled,
        step=None,
        why=why,
    )


class Conversation:
    """One session, notified as the gateway does."""

    def __init__(self, client: Client, idle: timedelta = IDLE) -> None:
        self.client = client
        self.session = SessionId(uuid4())
        self.notifier = TemporalNotifier(client, idle, PageLinks("http://127.0.0.1:30000/ui"))
        self.facts = SessionFacts(self.session, "default", "x-session-id", datetime(2026, 1, 2, tzinfo=UTC), 0)

    @property
    def handle(self) -> SessionHandle:
        return self.client.get_workflow_handle_for(
            SessionWorkflow.run,
            names.session_workflow_id(self.session),
        )

    async def say(
        self, *, version: int = 0, ends: bool = False, turn_id: TurnId | None = None, opens: bool = False
    ) -> TurnId:
        turn_id = turn_id or new_turn_id()
        await self.notifier.notify(SessionNotice(self.facts, TurnRecorded(turn_id, version, ends, opens)))
        return turn_id

    async def begin(self, **state: object) -> SessionHandle:
        """Start it with these fields of its state."""
        start = SessionState(
            session_id=self.session, policy="default", idle_seconds=IDLE.total_seconds(), adapter_version=0
        )
        await self.client.start_workflow(
            names.SESSION_WORKFLOW,
            start.model_copy(update=state),
            id=names.session_workflow_id(self.session),
            task_queue=names.WORKFLOW_QUEUE,
        )
        return self.handle


@asynccontextmanager
async def working(client: Client, scripted: ScriptedActivities, *, judges: int = 20) -> AsyncIterator[None]:
    """Workers for sessions, judging and the ledger; workflows that run at the end are terminated."""
    async with (
        Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=[scripted.close_session]),
        Worker(
            client,
            task_queue=names.JUDGE_QUEUE,
            activities=[scripted.judge_turn, scripted.judge_turns, scripted.collect_direct_vote],
            max_concurrent_activities=judges,
        ),
    ):
        try:
            yield
        finally:
            scripted.gate.set()
            await end_all(client)


async def end_all(client: Client) -> None:
    async for running in client.list_workflows('ExecutionStatus = "Running"'):
        with suppress(RPCError):  # the list lags behind: it has ended meanwhile
            await client.get_workflow_handle(running.id).terminate("the test is over")


@pytest.fixture(autouse=True, scope="module")
def _patient_signals() -> Iterator[None]:
    """Temporal may stop for some seconds on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clawloop.app.temporal.server.SIGNAL_LIMIT", timedelta(seconds=60))
        patch.setattr("clawloop.app.temporal.notifier.UPDATE_LIMIT", timedelta(seconds=60))
        yield


@pytest.fixture(autouse=True, scope="module")
def _short_pauses() -> Iterator[None]:
    """Between attempts at an episode, whose length few tests are about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workflows.activity_options.EPISODE_PAUSES", SHORT_PAUSES)
        yield


@pytest.fixture
async def scripted(client: Client) -> AsyncIterator[ScriptedActivities]:
    activities = ScriptedActivities()
    async with working(client, activities):
        yield activities


async def until(true: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.02)
