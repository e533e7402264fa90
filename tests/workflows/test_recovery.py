"""`clawloop recover`, with real servers: Temporal's database is deleted, or the two know different things."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import (
    Client,
    Interceptor,
    OutboundInterceptor,
    StartWorkflowInput,
    WorkflowExecutionStatus,
)
from temporalio.worker import Worker
from typer.testing import CliRunner

from activities.serving.publishing import PublishingActivities
from activities.sweep import SweepActivities
from activities.training.gate import GateActivities
from activities.training.steps import StepActivities
from activities.training.train_step import TrainingActivities
from clawloop.app.cli.main import app
from clawloop.app.processes.recovery import Recovery
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.recovery import TemporalRecovery
from clawloop.core.contracts.notices import BatchWaits, SessionNotice
from clawloop.core.contracts.sessions import (
    FeedbackGiven,
    RejudgeRequested,
    SessionFacts,
    ToldTurns,
    TurnRecorded,
    WaitingWork,
)
from clawloop.core.contracts.turns import TurnKind, TurnRecord
from clawloop.core.errors import SignalFailed
from clawloop.core.ids import SessionId
from db.invariants import violations
from db.recovery import PostgresRecoveryStore
from db.serving.publishing import PostgresPublishingStore
from db.sweep import PostgresSweepStore
from db.training.gate import PostgresGateStore
from db.training.steps import PostgresStepStore
from tests.fakes.trainer import FakeTrainer
from tests.judging.conftest import BINARY, Bench, bench, binary_bench, judge, set_recipe
from tests.workflows.conftest import IDLE, end_all
from tests.workflows.test_whole import Server, end, tell
from workflows import names
from workflows.registered import WORKFLOWS
from workflows.state import SessionState

__all__ = ["bench", "binary_bench", "judge"]

NO_TIME = timedelta(0)
# The pool of the policy that the bench makes.
POOL = "default"


@pytest.fixture
async def learner(binary_bench: Bench) -> Bench:
    """The policy takes a step for every two samples."""
    # Nobody probes here, and a first version would wait for the base model's answers.
    gate = BINARY.gate.model_copy(update={"general_probes": False})
    await set_recipe(binary_bench, BINARY.model_copy(update={"train": replace_batch(2), "gate": gate}))
    return binary_bench


def replace_batch(samples: int) -> Any:
    return BINARY.train.model_copy(update={"batch_samples": samples})


@asynccontextmanager
async def all_at_work(client: Client, b: Bench) -> AsyncIterator[None]:
    """What the orchestrator, the judge and a trainer run, with a trainer that computes nothing."""
    b.work._notifier = TemporalNotifier(client, IDLE)
    step_store, publishing = PostgresStepStore(b.database), PostgresPublishingStore(b.database)
    steps = StepActivities(step_store)
    sweeper = SweepActivities(
        PostgresSweepStore(b.database), TemporalNotifier(client, IDLE), b.work, IDLE, min_age=NO_TIME
    )
    gate = GateActivities(PostgresGateStore(b.database))
    local: list[Callable[..., Any]] = [*steps.where_workflows_run, gate.decide_version]
    ledger: list[Callable[..., Any]] = [
        *local,
        b.ledger.close_session,
        sweeper.sweep,
        steps.quarantine_step,
        steps.abandon_step,
        PublishingActivities(publishing, step_store, TemporalNotifier(client, IDLE)).publish_version,
    ]
    trainer = TrainingActivities(step_store, FakeTrainer())
    async with (
        Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=WORKFLOWS,
            activities=local,
            no_remote_activities=True,
        ),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=ledger),
        Worker(client, task_queue=names.JUDGE_QUEUE, activities=[b.judging.judge_turn, b.judging.judge_turns]),
        Worker(client, task_queue=names.trainer_queue(POOL), activities=[trainer.train_step]),
    ):
        yield


async def recover(address: str, url: str, data: Path) -> dict[str, Any]:
    here = {"DATABASE_URL": url, "TEMPORAL_ADDRESS": address, "CLAWLOOP_DATA": str(data)}
    done = await asyncio.to_thread(CliRunner().invoke, app, ["recover", "--json"], env=here)
    assert done.exit_code == 0, (done.stdout, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def notify(client: Client, session: SessionId, turns: list[TurnRecord], b: Bench) -> None:
    """As a gateway does, which then marks the turns."""
    for turn in turns:
        await tell(client, session, turn)
        b.execute("UPDATE turns SET announced_at = now() WHERE id = %s", turn.turn_id)


async def rows_are(b: Bench, query: str, expected: list[dict[str, Any]]) -> None:
    async with asyncio.timeout(60):
        while b.rows(query) != expected:
            await asyncio.sleep(0.05)


async def test_learning_goes_on_after_temporals_database_is_deleted(learner: Bench, tmp_path: Path) -> None:
    b = learner
    turns = b.conversation("one", "two", "three", "four", "five")
    other = b.conversation("a", "b", session="other")
    failed = b.conversation("k", "heartbeat", "l", session="failed")
    failed[1] = replace(failed[1], kind=TurnKind.SIDE, kind_reason="title")
    session, other_session, failed_session = [await b.insert(*some) for some in (turns[:2], other, failed)]
    server = Server(tmp_path / "temporal")
    with server.running():
        client = await server.ready()
        async with all_at_work(client, b):
            await notify(client, session, turns[:2], b)
            await rows_are(b, "SELECT count(*) AS n FROM samples", [{"n": 1}])
        # Nobody judges these any more, nor the feedback; their signals are lost with the database.
        await b.insert(*turns[2:4])
        await notify(client, session, turns[2:4], b)
        await notify(client, other_session, other, b)
        # What follows this reply, after a side turn, waits for nothing itself.
        await notify(client, failed_session, [failed[0], failed[2]], b)
        b.execute("UPDATE turns SET outcome = 'not_trainable' WHERE id = %s", failed[2].turn_id)
        facts = SessionFacts(session, "default", "x-session-id", turns[0].started_at, 0)
        feedback = b.feedback(turns[0], -1.0)
        await TemporalNotifier(client, IDLE).notify(SessionNotice(facts, FeedbackGiven(feedback, turns[0].turn_id)))
        b.execute("UPDATE feedback SET announced_at = now()")
    server.lose_data()
    with server.running():
        client = await server.ready()
        async with all_at_work(client, b):
            recovered = await recover(server.address, b.url, tmp_path)
            assert recovered["waiting"] == {"sessions": 3, "turns": 6, "feedback": 1}
            assert (recovered["policies"], recovered["unknown"]) == (["default"], [])
            await rows_are(b, "SELECT count(*) AS n FROM judgements WHERE decided_at IS NULL", [{"n": 0}])
            await rows_are(b, "SELECT count(*) AS n FROM samples WHERE state = 'trained'", [{"n": 4}])
            (head,) = b.rows("SELECT head FROM policies")
            assert head == {"head": 2}
            # A session goes on where it was.
            ending = replace(turns[4], ends_session=True)
            await b.insert(ending)
            await tell(client, session, ending, ends=True)
            await end(client, session)
            assert (await recover(server.address, b.url, tmp_path))["waiting"]["sessions"] == 1
    # Each of the five replies with an answer is judged by one request, and the rated one by the feedback alone.
    assert len(b.judge.requests) == len({json.dumps(request) for request in b.judge.requests}) == 6
    assert await violations(b.database) == []


async def test_a_turn_that_waits_in_a_closed_session_is_signalled_again(binary_bench: Bench) -> None:
    b = binary_bench
    await b.insert(*b.conversation("one"))
    b.execute("UPDATE turns SET announced_at = now()")
    # As one does that a gateway's disk held, and that is older than what closed its session.
    b.execute("UPDATE sessions SET state = 'closed', closed_at = now()")
    assert await PostgresRecoveryStore(b.database).forget_signals() == WaitingWork(1, 1, 0)
    assert b.rows("SELECT announced_at FROM turns") == [{"announced_at": None}]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """Of a server of its own: recovery looks at all open workflows, and other tests leave some."""
    server = Server(tmp_path / "temporal")
    with server.running():
        yield await server.ready()


async def test_the_lost_turns_of_sessions_that_the_older_copy_has_are_named(
    client: Client, binary_bench: Bench, tmp_path: Path
) -> None:
    b = binary_bench
    grown = b.conversation(*(f"message {n}" for n in range(9)), session="grown")
    rolled, closed, whole = (b.conversation("one", "two", "three", session=name) for name in ("r", "c", "w"))
    sessions = [await b.insert(*turns) for turns in (grown, rolled, closed, whole)]
    for session, turns in zip(sessions, (grown, rolled, closed, whole), strict=True):
        if turns is not rolled:
            await notify(client, session, turns, b)
    await client.get_workflow_handle(names.session_workflow_id(sessions[2])).terminate("it closed since")
    # After a roll-over: told of one turn in this run, of another one before, and one waits for its judging.
    state = SessionState(
        session_id=sessions[1],
        policy="default",
        idle_seconds=IDLE.total_seconds(),
        adapter_version=0,
        known=[rolled[0].turn_id],
        carried=[TurnRecorded(rolled[1].turn_id, 0)],
    )
    workflow, queue = names.session_workflow_id(sessions[1]), names.WORKFLOW_QUEUE
    await client.start_workflow(names.SESSION_WORKFLOW, state, id=workflow, task_queue=queue)
    await notify(client, sessions[1], rolled[2:], b)

    lost = [turn.turn_id for turn in (*grown[2:], *rolled, *closed[2:])]
    b.execute("DELETE FROM turns WHERE id = ANY(%s)", lost)  # as a copy of before them has it
    try:
        async with asyncio.timeout(60):
            # The list of workflows lags behind.
            while len((recovered := await recover(server_of(client), b.url, tmp_path))["unknown"]) < 3:
                await asyncio.sleep(0.5)
    finally:
        await end_all(client)
        await client.get_schedule_handle(names.SWEEP_ID).delete()
    named = ", ".join(str(turn.turn_id) for turn in grown[2:7])
    assert set(recovered["unknown"]) == {
        f"session {sessions[0]}: PostgreSQL lacks 7 of its turns: {named} and 2 later ones",
        f"session {sessions[1]}: PostgreSQL lacks 3 of its turns: " + ", ".join(str(turn.turn_id) for turn in rolled),
        f"session {sessions[2]}: PostgreSQL lacks 1 of its turns: {closed[2].turn_id}",
    }


def server_of(client: Client) -> str:
    return client.service_client.config.target_host


async def test_a_version_that_answered_and_is_lost_is_named(learner: Bench) -> None:
    lost = list[str]()
    recovered = await Recovery(PostgresRecoveryStore(learner.database), Scripted(), None).recover(lost.append)
    assert recovered.unknown == tuple(lost) == (LOST_VERSION,)


async def test_a_recovery_that_ends_half_way_is_run_again_and_nothing_is_missing(learner: Bench) -> None:
    b = learner
    (turn,) = b.conversation("one")
    await b.insert(turn)
    b.execute("UPDATE turns SET outcome = 'sampled'")
    b.execute(
        "INSERT INTO judgements (id, turn_id, recipe_hash, revision, evidence_hash)"
        " SELECT gen_random_uuid(), %s, recipe_hash, 1, '' FROM policies",
        turn.turn_id,
    )
    await b.insert(*b.conversation("two", session="waits"))
    whole = Scripted()
    await Recovery(PostgresRecoveryStore(b.database), whole, None).recover(list[str]().append)
    asked = f"rejudge {turn.turn_id} 1"
    assert whole.calls == ["prepare", "shown", "sessions", "end sessions", asked, "sweep", "restart"]

    for calls in range(len(whole.calls)):
        b.execute("UPDATE turns SET announced_at = now()")
        lost = list[str]()
        workflows = Scripted(ends_after=calls)
        recovery = Recovery(PostgresRecoveryStore(b.database), workflows, None)
        with pytest.raises(SignalFailed):
            await recovery.recover(lost.append)
        workflows.ends_after = None
        recovered = await recovery.recover(lost.append)
        assert set(lost) == {LOST_VERSION}, calls
        assert (recovered.waiting, recovered.rejudged, recovered.policies) == (WaitingWork(1, 1, 0), 1, ("default",))
        assert workflows.calls[calls:] == whole.calls  # all of it again
        assert b.rows("SELECT count(*) AS n FROM turns WHERE announced_at IS NULL") == [{"n": 1}]


LOST_VERSION = "version 7 of policy default answered; PostgreSQL's newest version is 0"


class Breaks(Interceptor):
    """Ends as a killed process does, before a workflow is started."""

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        class Outbound(OutboundInterceptor):
            async def start_workflow(self, input: StartWorkflowInput) -> Any:
                raise KeyboardInterrupt

        return Outbound(next)


async def test_a_recovery_that_is_killed_while_it_restarts_training_leaves_it_running(client: Client) -> None:
    """A policy with few samples: nothing but the recovery would start its workflow again."""
    policy = f"p{uuid4().hex}"
    notifier = TemporalNotifier(client, IDLE)
    await notifier.notify(BatchWaits(policy))
    handle = client.get_workflow_handle(names.training_workflow_id(policy))
    first = await handle.describe()
    broken = Client(**client.config() | {"interceptors": [Breaks()]})
    with pytest.raises(KeyboardInterrupt):
        await TemporalRecovery(broken, TemporalNotifier(broken, IDLE)).restart_training(policy)
    still = await handle.describe()
    assert (still.status, still.run_id) == (WorkflowExecutionStatus.RUNNING, first.run_id)
    await TemporalRecovery(client, notifier).restart_training(policy)
    second = await handle.describe()
    assert (second.status, second.run_id != first.run_id) == (WorkflowExecutionStatus.RUNNING, True)
    ended = await client.get_workflow_handle(handle.id, run_id=first.run_id).describe()
    assert ended.status is WorkflowExecutionStatus.TERMINATED
    await handle.terminate()
    # Also where none runs any more.
    await TemporalRecovery(client, notifier).restart_training(policy)
    assert (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
    await handle.terminate()


class Scripted:
    """A Temporal whose training workflow shows version 7 until it is started again.

    Args:
        ends_after: so many calls; then Temporal is away.
    """

    def __init__(self, ends_after: int | None = None) -> None:
        self.ends_after = ends_after
        self.calls: list[str] = []
        self._shows: int | None = 7

    def _call(self, name: str) -> None:
        if len(self.calls) == self.ends_after:
            raise SignalFailed("it is away")
        self.calls.append(name)

    async def prepare(self) -> None:
        self._call("prepare")

    async def shown_version(self, policy: str) -> int | None:
        self._call("shown")
        return self._shows

    async def restart_training(self, policy: str) -> None:
        self._call("restart")
        self._shows = None

    async def end_sessions(self) -> None:
        self._call("end sessions")

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None:
        self._call(f"rejudge {request.turn_id} {request.revision}")

    async def sweep(self) -> None:
        self._call("sweep")

    async def sessions(self) -> AsyncIterator[ToldTurns]:
        self._call("sessions")
        nobody: list[ToldTurns] = []
        for told in nobody:
            yield told
