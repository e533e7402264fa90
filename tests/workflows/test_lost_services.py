"""PostgreSQL is an older copy, lacks a key, or Temporal is empty, with real servers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from api.recording.spool import Spool, StrandedTurns, rejected_turns
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.processes.holding import Holding
from clawloop.app.processes.recovery import Recovered, Recovery
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.server import begin_sweeping, prepare_namespace
from clawloop.core.adapters.directory import AdapterFolder
from clawloop.core.contracts.notices import BatchWaits, SessionNotice
from clawloop.core.contracts.sessions import FeedbackGiven, SessionFacts
from clawloop.core.encryption.key_file import make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import SetupError
from clawloop.core.ids import new_api_key_id, new_turn_id
from clawloop.core.telemetry.metrics import GatewayMetrics
from db.invariants import violations
from db.judging.feedback import PostgresFeedbackStore
from db.recovery import PostgresRecoveryStore
from db.serving.directory import ensure_policy
from db.temporal_server import TemporalServerStore
from db.training.steps import PostgresStepStore
from db.turns.insert import PostgresTurnStore
from tests.api.conftest import until
from tests.conftest import database_address, execute
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE, end_all
from tests.workflows.test_recovery import Scripted, all_at_work, client, learner, notify, recover, rows_are, server_of
from tests.workflows.test_whole import Server
from workflows import names

__all__ = ["bench", "binary_bench", "client", "judge", "learner"]


# PostgreSQL is an older copy of itself, with real servers: what it lost is named, and learning goes on.


async def test_what_an_older_copy_of_postgresql_lost_is_named(
    client: Client, learner: Bench, tmp_path: Path, postgres_server: EmbeddedPostgres
) -> None:
    b = learner
    kept, lost = b.conversation("one", "two", session="kept"), b.conversation("a", "b", "c", session="lost")
    kept_session = await b.insert(*kept)
    await b.database.close()  # a database with connections cannot be copied
    execute(postgres_server.url, f"CREATE DATABASE older TEMPLATE {b.url.rsplit('/', 1)[1].split('?')[0]}")
    older = database_address(b.url, "older")
    try:
        lost_session = await b.insert(*lost)
        await begin_sweeping(client)
        async with all_at_work(client, b):
            await notify(client, kept_session, kept, b)
            await notify(client, lost_session, lost, b)
            await TemporalNotifier(client, IDLE).notify(BatchWaits("default"))
            await rows_are(b, "SELECT head FROM policies", [{"head": 1}])
            (version,) = b.rows("SELECT path FROM versions WHERE n = 1")
            (tmp_path / "adapters" / version["path"]).mkdir(parents=True)
        recovered = await recover(server_of(client), older, tmp_path)
    finally:
        await end_all(client)
        await client.get_schedule_handle(names.SWEEP_ID).delete()
        execute(postgres_server.url, "DROP DATABASE IF EXISTS older WITH (FORCE)")
    assert set(recovered["unknown"]) == {
        f"adapters/{version['path']}: PostgreSQL knows no such step",
        f"session {lost_session}: PostgreSQL has no such session",
    }
    # What the copy holds was never signalled there.
    assert recovered["waiting"] == {"sessions": 1, "turns": 2, "feedback": 0}


async def test_learning_goes_on_in_an_older_copy_of_postgresql(
    client: Client, learner: Bench, tmp_path: Path, postgres_server: EmbeddedPostgres
) -> None:
    b = learner
    turns = b.conversation("one", "two", "three")
    session = await b.insert(*turns)
    await b.database.close()  # a database with connections cannot be copied
    now = b.url.rsplit("/", 1)[1].split("?")[0]
    execute(postgres_server.url, f"CREATE DATABASE older TEMPLATE {now}")
    try:
        async with all_at_work(client, b):
            await notify(client, session, turns, b)
            await TemporalNotifier(client, IDLE).notify(BatchWaits("default"))
            await rows_are(b, "SELECT head FROM policies", [{"head": 1}])
            (version,) = b.rows("SELECT path FROM versions WHERE n = 1")
            (tmp_path / "adapters" / version["path"]).mkdir(parents=True)
        await b.database.close()
        execute(postgres_server.url, f"DROP DATABASE {now} WITH (FORCE)")
        execute(postgres_server.url, f"ALTER DATABASE older RENAME TO {now}")
        assert b.rows("SELECT count(*) AS n FROM judgements") == [{"n": 0}]
        # The session's workflow runs and knows all turns, so that it would drop their signals.
        await listed(client, f"WorkflowId = '{names.session_workflow_id(session)}'")
        await recover(server_of(client), b.url, tmp_path)
        async with all_at_work(client, b):
            await rows_are(b, "SELECT count(*) AS n FROM samples WHERE state = 'trained'", [{"n": 2}])
            # Version 1 answered, maybe also what a gateway's disk still holds: its number is not used again.
            await rows_are(b, "SELECT head FROM policies", [{"head": 3}])
            await recover(server_of(client), b.url, tmp_path)
            assert b.rows("SELECT n, state FROM steps ORDER BY n") == [
                {"n": 2, "state": "abandoned"},
                {"n": 3, "state": "committed"},
            ]
    finally:
        await end_all(client)
        await client.get_schedule_handle(names.SWEEP_ID).delete()
        execute(postgres_server.url, "DROP DATABASE IF EXISTS older WITH (FORCE)")
    assert await violations(b.database) == []


@pytest.mark.parametrize(
    ("lost", "steps", "next_step"),
    [
        (2, [(4, "claimed")], 4),
        (4, [(4, "abandoned")], 5),
        (6, [(4, "abandoned"), (7, "abandoned")], 8),
        (9, [(4, "abandoned"), (10, "abandoned")], 11),
    ],
)
async def test_numbers_up_to_the_highest_lost_version_are_skipped_also_by_an_open_step(
    learner: Bench, lost: int, steps: list[tuple[int, str]], next_step: int
) -> None:
    b = learner
    b.execute(
        "INSERT INTO steps (policy, n, parent, epoch, recipe_hash, state, finished_at) SELECT id, v.n, 0, epoch,"
        " recipe_hash, v.state, v.finished FROM policies, (VALUES (3, 'quarantined', now()), (4, 'claimed', NULL))"
        " AS v (n, state, finished)"
    )
    store = PostgresRecoveryStore(b.database)
    for _ in range(2):
        await store.skip_numbers("default", lost)
    rows = b.rows("SELECT n, state FROM steps WHERE n > 3 ORDER BY n")
    assert [(row["n"], row["state"]) for row in rows] == steps
    assert (await PostgresStepStore(b.database).status("default")).step == next_step


async def test_several_lost_versions_are_skipped_at_once(learner: Bench, tmp_path: Path) -> None:
    # Version 7 was shown; the directories are listed as their names sort.
    for n in (8, 9, 10):
        (tmp_path / "default" / f"v{n}-{'0' * 12}").mkdir(parents=True)
    adapters = AdapterFolder(tmp_path)
    assert [directory.n for directory in await adapters.directories()] == [10, 8, 9]
    await Recovery(PostgresRecoveryStore(learner.database), Scripted(), adapters).recover(list[str]().append)
    assert learner.rows("SELECT n FROM steps") == [{"n": 11}]


async def listed(client: Client, query: str) -> None:
    """Wait until the list of workflows, which lags behind, has one that fits."""
    async with asyncio.timeout(60):
        while not [run async for run in client.list_workflows(query)]:
            await asyncio.sleep(0.1)


# A restored PostgreSQL lacks a key: the turns that the disk holds of it are stored after `clawloop recover`.

LIMIT = 2**20


@asynccontextmanager
async def draining(b: Bench, folder: Path, sealer: Sealer | None) -> AsyncIterator[Spool]:
    """A gateway's recorder, which stores what the disk holds."""
    spool = Spool(folder, LIMIT, reserve_bytes=0, sealer=sealer)
    store, metrics = PostgresTurnStore(b.database), GatewayMetrics()
    try:
        async with (
            NotificationQueue(None, store, PostgresFeedbackStore(b.database), metrics) as notifications,
            Recorder(store, store, spool, metrics, notifications),
        ):
            yield spool
    finally:
        spool.close()


async def recover_keys(b: Bench, folder: Path, sealer: Sealer | None) -> Recovered:
    recovery = Recovery(PostgresRecoveryStore(b.database), Scripted(), None, StrandedTurns(folder, sealer))
    return await recovery.recover(list[str]().append)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_turns_of_a_lost_key_are_stored_as_those_of_a_revoked_one(
    binary_bench: Bench, tmp_path: Path, encrypted: bool
) -> None:
    b, folder, lost = binary_bench, tmp_path / "spool", new_api_key_id()
    sealer = None
    if encrypted:
        make_keys(tmp_path / "keys")
        sealer = Sealer(tmp_path / "keys")
    own = b.conversation("mine")[0]
    first, second = (replace(turn, api_key_id=lost) for turn in b.conversation("one", "two", session="lost"))
    async with draining(b, folder, sealer) as spool:
        # A gateway that knew the key for some seconds more; PostgreSQL does not any more.
        for turn in (own, first):
            spool.write(turn)
        await until(lambda: not spool.turns)
    assert [path.stem for path in rejected_turns(folder)] == [str(first.turn_id)]
    waits = Spool(folder, LIMIT, reserve_bytes=0, sealer=sealer)  # of a gateway that was stopped then
    waits.write(second)
    waits.close()

    recovered = await recover_keys(b, folder, sealer)

    assert recovered.put_back == 1
    named = f"key {lost} of policy default; 2 turns of it are on the disk, and are stored as those of a revoked key"
    assert recovered.unknown[1:] == (named,)
    async with draining(b, folder, sealer) as spool:
        await until(lambda: not spool.turns)
    stored = "SELECT t.id FROM turns t JOIN sessions s ON s.id = t.session_id WHERE s.api_key_id = %s ORDER BY t.id"
    assert b.rows(stored, lost) == [{"id": first.turn_id}, {"id": second.turn_id}]
    (key,) = b.rows("SELECT name, revoked_at IS NOT NULL AS revoked FROM api_keys WHERE id = %s", lost)
    assert key == {"name": "lost", "revoked": True}
    again = await recover_keys(b, folder, sealer)
    assert (again.put_back, again.unknown[1:]) == (0, ())
    assert await violations(b.database) == []


async def test_turns_of_a_lost_policy_wait_until_it_is_made_again(binary_bench: Bench, tmp_path: Path) -> None:
    b, folder, lost = binary_bench, tmp_path / "spool", new_api_key_id()
    turn = replace(b.conversation("one")[0], api_key_id=lost, policy="anna")
    async with draining(b, folder, None) as spool:
        spool.write(turn)
        await until(lambda: not spool.turns)
    recovered = await recover_keys(b, folder, None)
    held = f"policy anna, with key {lost}; 1 turns of it are on the disk: make the policy again"
    assert (recovered.put_back, recovered.unknown[-1][: len(held)]) == (0, held)
    await ensure_policy(b.database, "anna", "tiny", [])
    recovered = await recover_keys(b, folder, None)
    assert (recovered.put_back, recovered.unknown[-1].startswith(f"key {lost} of policy anna")) == (1, True)
    async with draining(b, folder, None) as spool:
        await until(lambda: not spool.turns)
    assert b.rows("SELECT id FROM turns") == [{"id": turn.turn_id}]


async def test_what_was_set_aside_for_another_reason_stays_there(binary_bench: Bench, tmp_path: Path) -> None:
    b, folder = binary_bench, tmp_path / "spool"
    known, lost = b.conversation("one")[0], replace(b.conversation("two")[0], api_key_id=new_api_key_id())
    spool = Spool(folder, LIMIT, reserve_bytes=0)
    for turn in (known, lost):
        spool.write_rejected(turn)
    (folder / "gateway-0" / "rejected" / f"{new_turn_id()}.json").write_text("{}")
    spool.close()
    assert (await recover_keys(b, folder, None)).put_back == 1
    assert len(rejected_turns(folder)) == 2
    # As after one that ended before it put the turn back: the key is stored already.
    spool = Spool(folder, LIMIT, reserve_bytes=0)
    spool.reject(lost.turn_id)
    spool.close()
    assert (await recover_keys(b, folder, None)).put_back == 1


async def test_a_spool_that_this_user_may_not_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    (folder / "gateway-0" / "lock").mkdir(parents=True)  # also root cannot open it
    with pytest.raises(SetupError, match="run this as the user of the gateways"):
        await StrandedTurns(folder, None).keys()


async def test_a_running_gateway_stores_what_was_put_back(binary_bench: Bench, tmp_path: Path) -> None:
    b, folder, lost = binary_bench, tmp_path / "spool", new_api_key_id()
    turn = replace(b.conversation("one")[0], api_key_id=lost)
    async with draining(b, folder, None) as spool:
        spool.write(turn)
        await until(lambda: rejected_turns(folder))
        assert (await recover_keys(b, folder, None)).put_back == 1
        async with asyncio.timeout(30):
            while not b.rows("SELECT FROM turns"):
                await asyncio.sleep(0.1)


# Temporal's database is deleted, and nobody runs a command: the orchestrators have what waits signalled again.


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
@pytest.mark.long
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
