"""PostgreSQL is an older copy of itself, with real servers: what it lost is named, and learning goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.client import Client

from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.processes.recovery import Recovery
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.server import begin_sweeping
from clawloop.core.adapters.directory import AdapterFolder
from clawloop.core.contracts.notices import BatchWaits
from db.invariants import violations
from db.recovery import PostgresRecoveryStore
from db.training.steps import PostgresStepStore
from tests.conftest import database_address, execute
from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import IDLE, end_all
from tests.workflows.test_recovery import Scripted, all_at_work, client, learner, notify, recover, rows_are, server_of
from workflows import names

__all__ = ["bench", "binary_bench", "client", "judge", "learner"]


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
