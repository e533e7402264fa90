"""One trace from a stored turn over its judge to the step: real Temporal and PostgreSQL, a scripted trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import SessionFacts, TurnRecorded
from clawloop.core.telemetry.tracing import span
from tests.judging.conftest import BINARY, Bench, bench, binary_bench, judge, set_recipe
from tests.spans import everything_said, kept_spans, named, trace_of
from tests.workflows.conftest import IDLE, Conversation, ScriptedActivities, end_all, until
from tests.workflows.learning import ScriptedLearning
from workflows import names
from workflows.session import SessionWorkflow
from workflows.training import TrainingWorkflow

__all__ = ["bench", "binary_bench", "judge"]

ASKED = ("Where does the zebra live?", "No, the giraffe.")


@asynccontextmanager
async def at_work(client: Client, bench: Bench, step: ScriptedLearning) -> AsyncIterator[None]:
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
        async with at_work(client, at, scripted):
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
