"""Sessions from announcement to sample, with their traces: real Temporal, real PostgreSQL, a judge over HTTP."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.sweep import SweepActivities
from clawloop.app.local.checks import choose_port
from clawloop.app.local.services import temporal_server
from clawloop.app.processes.bootstrap import prepare
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import register_search_attributes
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.sessions import SessionFacts, TurnRecorded
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.ids import SessionId, turn_id_of
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.telemetry.tracing import span
from db.database import Database
from db.serving.directory import ensure_policy
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from db.sweep import PostgresSweepStore
from db.training.recipes import ensure_recipe
from tests.chaos.proxy import Proxy
from tests.contract.conftest import TEST_LIMIT
from tests.e2e.gateway import RealGateway, running_gateway
from tests.fakes.engine import fake_engine
from tests.judging.conftest import BINARY, Bench, bench, binary_bench, judge, set_recipe
from tests.spans import Collector, everything_said, kept_spans, named, trace_of
from tests.workflows.conftest import IDLE, Conversation, ScriptedActivities, end_all, until
from tests.workflows.learning import ScriptedLearning
from workflows import names
from workflows.session import SessionWorkflow
from workflows.training import TrainingWorkflow

__all__ = ["bench", "binary_bench", "judge"]


# Sessions from announcement to sample: real Temporal, real PostgreSQL, a judge over HTTP.


@asynccontextmanager
async def at_work(client: Client, bench: Bench) -> AsyncIterator[None]:
    async with (
        Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=[bench.ledger.close_session]),
        Worker(
            client,
            task_queue=names.JUDGE_QUEUE,
            activities=[bench.judging.judge_turn, bench.judging.judge_turns, bench.judging.collect_direct_vote],
        ),
    ):
        try:
            yield
        finally:
            await end_all(client)


async def tell(client: Client, session: SessionId, turn: TurnRecord, *, ends: bool = False) -> None:
    facts = SessionFacts(session, "default", "x-session-id", turn.started_at, turn.version)
    await TemporalNotifier(client, IDLE).notify(SessionNotice(facts, TurnRecorded(turn.turn_id, turn.version, ends)))


async def end(client: Client, session: SessionId) -> None:
    async with asyncio.timeout(120):
        await client.get_workflow_handle(names.session_workflow_id(session)).result()


async def test_out_of_order_late_and_repeated_turns_are_each_judged_once(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation(*(f"message {n}" for n in range(12)))
    session = await b.insert(*turns)
    told = [*turns[:-1], *turns[:-1]]
    random.Random(7).shuffle(told)
    async with at_work(client, b):
        for turn in told:
            await tell(client, session, turn)
        await tell(client, session, turns[-1], ends=True)
        await end(client, session)
    assert len(b.judge.requests) == 11
    outcomes = [(await b.turn(turn.turn_id)).outcome for turn in turns]
    assert outcomes == ["sampled"] * 11 + ["no_feedback"]
    assert len(b.rows("SELECT * FROM samples")) == 11
    assert b.rows("SELECT state FROM sessions") == [{"state": "closed"}]


async def test_what_was_stored_while_temporal_was_away_is_swept_and_judged(client: Client, binary_bench: Bench) -> None:
    b = binary_bench
    turns = b.conversation("one", "two", "three")
    session = await b.insert(*turns[:-1], replace(turns[-1], ends_session=True))
    notifier = TemporalNotifier(client, IDLE)
    sweeper = SweepActivities(PostgresSweepStore(b.database), notifier, b.work, IDLE, timedelta(0))
    async with at_work(client, b):
        assert (await sweeper.sweep()).turns == 3
        await end(client, session)
    outcomes = [(await b.turn(turn.turn_id)).outcome for turn in turns]
    assert outcomes == ["sampled", "sampled", "no_feedback"]


async def test_no_text_of_the_conversation_is_in_temporal_and_payloads_are_small(client: Client, bench: Bench) -> None:
    bench.judge.votes, bench.judge.hint = [-1], "SECRET hint of the judge, to be kept."
    turns = bench.conversation("SECRET question", "SECRET answer", "x" * 100_000)
    session = await bench.insert(*turns)
    handle = client.get_workflow_handle(names.session_workflow_id(session))
    async with at_work(client, bench):
        await tell(client, session, turns[0])
        await tell(client, session, turns[1])
        await until(lambda: bool(bench.rows("SELECT 1 FROM judgements WHERE hint LIKE 'SECRET%%'")))
        bench.judge.mode = "404"  # it repeats the question
        await tell(client, session, turns[2], ends=True)
        await end(client, session)
        history = await handle.fetch_history()
    # Not its JSON, in which payloads are base64: no text would be found there, whatever is stored.
    stored = b"".join(event.SerializeToString() for event in history.events)
    assert all(str(turn.turn_id).encode() in stored for turn in turns)
    assert b"SECRET" not in stored
    assert b"xxxxx" not in stored
    assert max(event.ByteSize() for event in history.events) < 4_000
    # Beginning and closing take 10; each turn at most 12.
    assert len(history.events) <= 10 + 12 * len(turns)


# One trace from a stored turn over its judge to the step: real Temporal and PostgreSQL, a scripted trainer.

ASKED = ("Where does the zebra live?", "No, the giraffe.")


@asynccontextmanager
async def traced_at_work(client: Client, bench: Bench, step: ScriptedLearning) -> AsyncIterator[None]:
    judging = bench.judging
    steps = [*step.where_workflows_run, *step.on_the_queue]
    async with (
        Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=[SessionWorkflow, TrainingWorkflow],
            activities=step.where_workflows_run,
            no_remote_activities=True,
        ),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=[bench.ledger.close_session, *steps]),
        Worker(client, task_queue=names.JUDGE_QUEUE, activities=[judging.judge_turn, judging.judge_turns, step.probe]),
        Worker(client, task_queue=names.trainer_queue(step.pool), activities=[step.train]),
    ):
        try:
            yield
        finally:
            await end_all(client)


async def test_a_turns_trace_goes_on_to_its_judge_and_to_the_step(
    client: Client, temporal_address: str, binary_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = binary_bench
    train = BINARY.train.model_copy(update={"batch_samples": 1})
    await set_recipe(at, BINARY.model_copy(update={"train": train}))
    first, second = at.conversation(*ASKED)
    session = await at.insert(first, second)
    scripted = ScriptedLearning()
    scripted.policy, scripted.ready = "default", scripted.needed
    with kept_spans() as kept:
        client = await connect(temporal_address)  # the fixture's has no tracing
        monkeypatch.setattr(at.notifier, "notify", TemporalNotifier(client, IDLE).notify)
        async with traced_at_work(client, at, scripted):
            with span("chat") as chat:
                chat.set(turn=str(second.turn_id))
                facts = SessionFacts(session, "default", "x-session-id", second.started_at, 0)
                recorded = TurnRecorded(second.turn_id, 0, False)
                await TemporalNotifier(client, IDLE).notify(SessionNotice(facts, recorded))
            await until(lambda: scripted.version == 1 and not scripted.at_once)
            await until(lambda: bool(named(kept, "RunActivity:train_step")))
    (root,) = named(kept, "chat")
    for activity in ("judge_turn", "claim_batch", "train_step"):
        # A claim that finds too few samples may follow, and an activity is run again where its answer came too late.
        assert trace_of(root) in map(trace_of, named(kept, f"RunActivity:{activity}")), activity
    _holds_nothing_of(kept, *ASKED, "answer 0", "zebra", "giraffe", "my verdict")
    assert at.judge.requests


async def test_an_activitys_error_leaves_only_its_type(client: Client, temporal_address: str) -> None:
    scripted = ScriptedActivities()
    failures = [cast(Any, RuntimeError("the zebra is striped"))]
    scripted.fails = lambda ask: failures.pop() if failures else None
    with kept_spans() as kept:
        client = await connect(temporal_address)  # the fixture's has no tracing
        async with (
            Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]),
            Worker(client, task_queue=names.LEDGER_QUEUE, activities=[scripted.close_session]),
            Worker(client, task_queue=names.JUDGE_QUEUE, activities=[scripted.judge_turn, scripted.judge_turns]),
        ):
            try:
                with span("chat"):
                    await Conversation(client).say()
                await until(lambda: len(named(kept, "RunActivity:judge_turn")) == 2)
            finally:
                await end_all(client)
    failed, _ = sorted(named(kept, "RunActivity:judge_turn"), key=lambda run: run.start_time or 0)
    assert failed.status.description == "ApplicationError: RuntimeError: RuntimeError"
    _holds_nothing_of(kept, "zebra")


async def test_by_default_temporal_makes_no_spans(client: Client) -> None:
    assert client.config()["interceptors"] == []


def _holds_nothing_of(kept: InMemorySpanExporter, *texts: str) -> None:
    said = everything_said(kept)
    assert [text for text in texts if text in said] == []


# A gateway and a judge as processes of their own, with a collector in their environment.

JUDGED = "RunActivity:judge_turn"


@contextmanager
def process(environment: dict[str, str], *words: str, fd: int | None = None) -> Iterator[None]:
    """A command of `clawloop`, stopped at the end as `up` stops it."""
    running = subprocess.Popen(
        [sys.executable, "-m", "clawloop.app.cli.main", *words],
        env=dict(os.environ) | environment,
        pass_fds=() if fd is None else (fd,),
    )
    try:
        yield
    finally:
        running.terminate()
        assert running.wait(60) in (0, -signal.SIGTERM)  # a gateway ends by the signal


async def talk(chats: httpx.AsyncClient) -> None:
    """A session of two turns."""
    said = [{"role": "user", "content": f"hello {uuid4()}"}]
    for _ in range(2):
        answer = await chats.post("/v1/chat/completions", json={"model": "policy", "messages": said})
        assert answer.status_code == 200
        said = [*said, answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]


async def test_processes_send_their_spans_and_share_traces(
    client: Client, temporal_address: str, postgres_url: str, tmp_path: Path
) -> None:
    database = Database(postgres_url, TEST_LIMIT)
    await ensure_policy(database, "default", "tiny", [])
    await ensure_recipe(database, "default", Recipe(name="combined"))
    _, secret = await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "test")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with fake_engine() as engine:
        await add_engine(database, engine.url)
        with Collector() as collector, kept_spans(), listener:
            traced = await connect(temporal_address)  # as an orchestrator's, which hands a trace on
            environment = {
                "DATABASE_URL": postgres_url,
                "TEMPORAL_ADDRESS": temporal_address,
                "CLAWLOOP_DATA": str(tmp_path),
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "100",
            }
            gateway = process(environment, "gateway", "--fd", str(listener.fileno()), fd=listener.fileno())
            async with Worker(traced, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]):
                with gateway, process(environment, "worker", "judge"):
                    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": secret}, timeout=120) as chats:
                        async with asyncio.timeout(240):
                            # A turn that waited in the spool begins a trace of its own: a busy machine needs another.
                            while not collector.traces(JUDGED) & collector.traces("chat"):
                                before = collector.traces(JUDGED)
                                await talk(chats)
                                await until(lambda before=before: collector.traces(JUDGED) != before)  # type: ignore[misc]
                    await until(lambda: {"engine", "record turn"} <= collector.spans().keys())
                await end_all(client)
    await database.close()
    spans = collector.spans()
    assert {spans[name] for name in ("chat", "engine", "record turn")} == {"clawloop-gateway"}
    assert spans[JUDGED] == "clawloop-judge"


# Temporal stops under a running gateway: chat goes on, and its turns are judged when Temporal is back.


class Server:
    """A development server of the test's own, that can be ended and started again on its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = temporal_server.Ports(*(choose_port("Temporal", temporal_server.HOST, 0, "") for _ in range(3)))
        self.address = f"{temporal_server.HOST}:{self.ports.main}"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        started = temporal_server.launch(self.folder, self.ports, os.environ)
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(started.command, env=dict(started.environment), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(60)

    async def ready(self) -> Client:
        client = await self.answers()
        await register_search_attributes(client)
        return client

    async def answers(self) -> Client:
        """As `ready`, with nothing prepared."""
        async with asyncio.timeout(60):
            while not await temporal_server.is_ready(self.ports.http):
                await asyncio.sleep(0.1)
        return await connect(self.address)

    def lose_data(self) -> None:
        """While it does not run."""
        for file in self.folder.glob("temporal.db*"):
            file.unlink()


async def say(gateway: RealGateway, messages: list[dict[str, str]], text: str, *, done: bool = False) -> str:
    messages.append({"role": "user", "content": text})
    async with gateway.client(timeout=60) as client:
        body = {"model": "policy", "messages": messages, "session_id": "away", "session_done": done}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    # Each reply is the same; the user's next words keep the turns apart.
    messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    response: str = answer.json()["id"]
    return response


async def test_chat_goes_on_and_is_judged_when_temporal_is_back(binary_bench: Bench, tmp_path: Path) -> None:
    b = binary_bench
    server = Server(tmp_path)
    async with fake_engine() as engine:
        keys = await prepare(b.url, "tiny", [], [engine.url], {})
        with server.running() as process:
            await server.ready()
            async with running_gateway(b.url, keys, tmp_path / "data", TEMPORAL_ADDRESS=server.address) as gateway:
                messages: list[dict[str, str]] = []
                said = [await say(gateway, messages, "one")]
                async with asyncio.timeout(30):
                    while (await gateway.turn(said[0])).announced_at is None:
                        await asyncio.sleep(0.1)
                process.send_signal(signal.SIGSTOP)
                said.append(await say(gateway, messages, "two"))
                process.send_signal(signal.SIGCONT)
                process.terminate()
                await asyncio.to_thread(process.wait, 60)
                said += [await say(gateway, messages, "three"), await say(gateway, messages, "four", done=True)]
                assert (await gateway.turn(said[-1])).announced_at is None
        with server.running():
            client = await server.ready()
            sweeper = SweepActivities(
                PostgresSweepStore(b.database), TemporalNotifier(client, IDLE), b.work, IDLE, timedelta(0)
            )
            async with at_work(client, b):
                assert (await sweeper.sweep()).turns >= 2
                session = (await gateway.turn(said[0])).session_id
                await end(client, session)
    turns = [await b.turn(turn_id) for reply in said if (turn_id := turn_id_of(reply)) is not None]
    assert [turn.outcome for turn in turns] == ["sampled", "sampled", "sampled", "no_feedback"]
    assert all(turn.announced_at is not None for turn in turns)
    assert b.rows("SELECT state FROM sessions") == [{"state": "closed"}]


async def test_a_silent_connection_is_replaced_before_a_step_is_a_minute_late(temporal_address: str) -> None:
    async with Proxy(int(temporal_address.rpartition(":")[2]), choose_port("the proxy", "127.0.0.1", 0, "")) as proxy:
        client = await connect(f"127.0.0.1:{proxy.port}")
        assert await client.service_client.check_health()
        proxy.silence()
        silent_since = time.monotonic()
        async with asyncio.timeout(60):
            while not await _answers(client):
                pass
    # The SDK's default takes 45 s.
    assert time.monotonic() - silent_since < 35


async def _answers(client: Client) -> bool:
    try:
        return await client.service_client.check_health(retry=True)
    except RPCError:
        return False


async def test_a_worker_serves_its_metrics(temporal_address: str, binary_bench: Bench, tmp_path: Path) -> None:
    port = choose_port("the worker", "127.0.0.1", 0, "")
    command = [sys.executable, "-m", "clawloop.app.cli.main", "worker", "judge", "--health-port", str(port)]
    settings = {"DATABASE_URL": binary_bench.url, "TEMPORAL_ADDRESS": temporal_address, "CLAWLOOP_DATA": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, env=dict(os.environ) | settings, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            async with asyncio.timeout(240):
                while True:
                    try:
                        if (await client.get("/readyz")).status_code == 200:
                            break
                    except httpx.TransportError:
                        assert worker.poll() is None, (tmp_path / "log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
            metrics = await client.get("/metrics")
        assert metrics.status_code == 200
        assert "# TYPE clawloop_worker_judge_request_seconds histogram" in metrics.text
    finally:
        worker.terminate()
        assert await asyncio.to_thread(worker.wait, 60) == 0
