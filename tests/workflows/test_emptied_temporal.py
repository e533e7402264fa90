"""Temporal's database is deleted, and nobody runs a command: the orchestrators have what waits signalled again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from clawloop.app.processes.holding import Holding
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.server import prepare_namespace
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import FeedbackGiven, SessionFacts
from db.invariants import violations
from db.temporal_server import TemporalServerStore
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE
from tests.workflows.test_recovery import all_at_work, learner, notify, rows_are
from tests.workflows.test_temporal_away import Server
from workflows import names

__all__ = ["bench", "binary_bench", "judge", "learner"]


async def test_what_waited_is_judged_and_trained_after_a_start_on_an_emptied_temporal(
    learner: Bench, tmp_path: Path
) -> None:
    b = learner
    turns = b.conversation("one", "two", "three", "four")
    session = await b.insert(*turns)
    server = Server(tmp_path / "temporal")
    with server.running():
        client = await server.answers()
        before = holding(b, client)
        await before.begin()
        # Nobody judges these, nor the feedback; their signals are lost with the database.
        await notify(client, session, turns, b)
        facts = SessionFacts(session, "default", "x-session-id", turns[0].started_at, 0)
        given = FeedbackGiven(b.feedback(turns[0], -1.0), turns[0].turn_id)
        await TemporalNotifier(client, IDLE).notify(SessionNotice(facts, given))
        b.execute("UPDATE feedback SET announced_at = now()")
        await before.end()
    server.lose_data()
    with server.running():
        client = await server.answers()
        await holding(b, client).begin()
        async with all_at_work(client, b):
            await client.get_schedule_handle(names.SWEEP_ID).trigger()
            await rows_are(b, "SELECT count(*) AS n FROM samples WHERE state = 'trained'", [{"n": 2}])
            await rows_are(b, "SELECT count(*) AS n FROM turns WHERE outcome = 'waiting'", [{"n": 1}])
            await rows_are(b, "SELECT count(*) AS n FROM feedback WHERE applied_at IS NULL", [{"n": 0}])
    assert await violations(b.database) == []


def holding(b: Bench, client: Client) -> Holding:
    """As an orchestrator has."""
    return Holding(TemporalServerStore(b.database), client, asyncio.Event(), partial(prepare_namespace, client))


@pytest.mark.timeout(600)
async def test_an_orchestrator_that_runs_on_prepares_a_server_that_lost_its_data_and_has_it_told_again(
    binary_bench: Bench, tmp_path: Path
) -> None:
    b = binary_bench
    turns = b.conversation("one")
    session = await b.insert(*turns)
    b.execute("UPDATE turns SET entered_at = now() - interval '1 minute'")  # old enough for the sweep
    facts = SessionFacts(session, "default", "x-session-id", datetime.now(UTC), 0)
    server = Server(tmp_path / "temporal")
    with running_orchestrator(b, server, tmp_path):
        with server.running():
            client = await server.answers()
            await is_prepared(client)
            await notify(client, session, turns, b)
        server.lose_data()
        lost_at = datetime.now(UTC)
        with server.running():
            client = await server.answers()
            await is_prepared(client)
            # A start with search attributes, as gateways signal a turn.
            await TemporalNotifier(client, IDLE).notify(SessionNotice(facts, None))
            async with asyncio.timeout(120):  # by the sweep of the schedule, a minute apart
                while not b.rows("SELECT FROM turns WHERE announced_at > %s", lost_at):
                    await asyncio.sleep(0.5)
            history = await client.get_workflow_handle(names.session_workflow_id(session)).fetch_history()
    signals = [event.workflow_execution_signaled_event_attributes.signal_name for event in history.events]
    assert names.TURN_RECORDED in signals


@contextmanager
def running_orchestrator(b: Bench, server: Server, folder: Path) -> Iterator[None]:
    """The process, which may start before its servers do."""
    here = {"DATABASE_URL": b.url, "TEMPORAL_ADDRESS": server.address, "CLAWLOOP_DATA": str(folder / "data")}
    command = [sys.executable, "-m", "clawloop.app.cli.main", "worker", "orchestrator"]
    with (folder / "orchestrator.log").open("wb") as log:
        process = subprocess.Popen(command, env=dict(os.environ) | here, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, (folder / "orchestrator.log").read_text()
    finally:
        process.terminate()
        process.wait(60)


async def is_prepared(client: Client) -> None:
    """Until it has the sweep's schedule and the policy's training workflow; renewals look every 15 s."""
    async with asyncio.timeout(120):
        for described in (
            client.get_schedule_handle(names.SWEEP_ID).describe,
            client.get_workflow_handle(names.training_workflow_id("default")).describe,
        ):
            while True:
                try:
                    await described()
                    break
                except RPCError:
                    await asyncio.sleep(0.2)
