"""Upgrades and downgrades of the schema; databases of another schema or another Temporal."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

import migrations
from clawloop.app.processes import holding, workers
from clawloop.app.processes.database import ready_database
from clawloop.app.processes.holding import Holding, take_database
from clawloop.core.contracts.sessions import SessionFacts, TurnRecorded, WaitingWork
from clawloop.core.errors import SetupError, StoreUnavailable
from clawloop.core.ids import new_feedback_id
from clawloop.core.settings import read_settings
from db import schema
from db.database import Database, driver_url
from db.schema import is_current, migrate, migrate_down, revisions
from db.sweep import PostgresSweepStore
from db.tables import Base
from db.temporal_server import TemporalServerStore
from tests.conftest import execute
from tests.contract.conftest import TEST_LIMIT, Stores
from tests.records import turn_record
from tests.verbs import clawloop, clawloop_process, refusal
from tests.workflows.conftest import client

__all__ = ["client"]


# Upgrades and downgrades of the schema, and databases with another schema.


def tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        return {name for (name,) in found} - {"alembic_version"}


async def current(url: str) -> bool:
    database = Database(url, TEST_LIMIT)
    try:
        return await is_current(database)
    finally:
        await database.close()


def test_downgrades_undo_upgrades(empty_postgres_url: str) -> None:
    assert tables(empty_postgres_url) == set()
    migrate(empty_postgres_url)
    assert tables(empty_postgres_url) == set(Base.metadata.tables)
    migrate_down(empty_postgres_url, "base")
    assert tables(empty_postgres_url) == set()
    with psycopg.connect(empty_postgres_url) as connection:
        functions = "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        assert connection.execute(functions).fetchall() == []
    migrate(empty_postgres_url)
    migrate(empty_postgres_url)  # nothing to do
    assert tables(empty_postgres_url) == set(Base.metadata.tables)


SECOND = """
from alembic import op

revision = "0002"
down_revision = {first!r}
branch_labels = None
depends_on = None


def upgrade():
    op.execute("ALTER TABLE engines ADD COLUMN region text NOT NULL DEFAULT 'here'")


def downgrade():
    op.execute("ALTER TABLE engines DROP COLUMN region")
"""


@contextmanager
def next_release(folder: Path) -> Iterator[None]:
    """While this is entered, the code has one more migration."""
    shutil.copytree(Path(migrations.__file__).parent, folder / "migrations", dirs_exist_ok=True)
    second = folder / "migrations" / "versions" / "v0002_regions.py"
    second.write_text(SECOND.format(first=revisions()[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "files", lambda name: folder / name)
        revisions.cache_clear()
        yield
    revisions.cache_clear()


async def test_a_second_migration_changes_a_database_with_rows_and_has_a_way_back(
    empty_postgres_url: str, tmp_path: Path
) -> None:
    def engines() -> list[tuple[object, ...]]:
        with psycopg.connect(empty_postgres_url) as connection:
            return connection.execute("SELECT * FROM engines").fetchall()

    await asyncio.to_thread(migrate, empty_postgres_url)
    execute(empty_postgres_url, "INSERT INTO engines (id, url) VALUES ('a', 'http://a')")
    (before,) = engines()
    with next_release(tmp_path):
        assert not await current(empty_postgres_url)
        await asyncio.to_thread(migrate, empty_postgres_url)
        assert await current(empty_postgres_url)
        assert engines() == [(*before, "here")]
    assert not await current(empty_postgres_url)
    with pytest.raises(SetupError, match=r"\(revision 0002\)"):
        await asyncio.to_thread(migrate, empty_postgres_url)
    with next_release(tmp_path):
        await asyncio.to_thread(migrate_down, empty_postgres_url, "-1")
    assert await current(empty_postgres_url)
    assert engines() == [before]


def test_the_migrated_schema_is_the_one_the_code_describes(postgres_url: str) -> None:
    engine = create_engine(driver_url(postgres_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_every_check_of_the_code_is_in_the_migrated_schema(postgres_url: str, empty_postgres_url: str) -> None:
    """Alembic compares no CHECK constraints, so PostgreSQL's own words for them are compared."""
    engine = create_engine(driver_url(empty_postgres_url))
    Base.metadata.create_all(engine)
    engine.dispose()

    assert _checks(empty_postgres_url) == _checks(postgres_url)
    assert len(_checks(postgres_url)) > 8


def test_concurrent_migrations_are_safe(empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 200.0)  # the last one waits for three, on a busy machine

    async def all_at_once() -> None:
        await asyncio.gather(*(asyncio.to_thread(migrate, empty_postgres_url) for _ in range(4)))

    asyncio.run(all_at_once())

    assert tables(empty_postgres_url) == set(Base.metadata.tables)


def test_migrating_works_from_any_working_directory(
    empty_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    migrate(empty_postgres_url)
    assert tables(empty_postgres_url)


async def test_a_schema_is_current_only_at_this_codes_revision(empty_postgres_url: str) -> None:
    assert not await current(empty_postgres_url)

    await asyncio.to_thread(migrate, empty_postgres_url)
    assert await current(empty_postgres_url)

    execute(empty_postgres_url, "UPDATE alembic_version SET version_num = '0029'")
    assert not await current(empty_postgres_url)


@pytest.fixture
def foreign_url(empty_postgres_url: str) -> str:
    """A database that another version migrated."""
    migrate(empty_postgres_url)
    execute(empty_postgres_url, "UPDATE alembic_version SET version_num = '0029'")
    return empty_postgres_url


FOREIGN = r"made this database's schema \(revision 0029\).* start this one with a new data folder \(--data\)"


def test_migrate_and_a_gateway_refuse_a_database_of_another_version_in_one_line(
    foreign_url: str, tmp_path: Path
) -> None:
    here = {"DATABASE_URL": foreign_url, "CLAWLOOP_DATA": str(tmp_path)}
    assert re.search(FOREIGN, refusal(clawloop("migrate", **here)))
    assert re.search(FOREIGN, refusal(clawloop_process("gateway", "--port", "0", **here)))


async def test_workers_refuse_a_database_of_another_version(foreign_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", foreign_url)
    async with AsyncExitStack() as stack:
        with pytest.raises(SetupError, match=FOREIGN):
            await ready_database(read_settings(), stack)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://a:secret@127.0.0.1/b", "must begin with postgresql://"),
        ("nonsense:secret", "not a valid address"),
        ("postgresql://a:secret@127.0.0.1:port/b", "not a valid address"),
        ("postgresql://a:top@secret@127.0.0.1/b", "not a valid address"),
    ],
    ids=["another database", "no address", "no port", "two at signs"],
)
def test_an_unusable_address_is_a_one_line_error(url: str, message: str) -> None:
    _assert_one_line_error(url, message)


def test_an_address_where_nobody_listens_is_a_one_line_error() -> None:
    with socket.socket() as bound:  # bound and never listening, so that no other program can take the port
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        _assert_one_line_error(
            f"postgresql://a:secret@127.0.0.1:{port}/b", "cannot use the database: connection failed"
        )


def _assert_one_line_error(url: str, message: str) -> None:
    with pytest.raises(SetupError, match=message) as raised:
        migrate(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_user_without_rights_gets_the_grant_to_run(empty_postgres_url: str) -> None:
    execute(empty_postgres_url, "DROP ROLE IF EXISTS guest")
    execute(empty_postgres_url, "CREATE ROLE guest LOGIN PASSWORD 'guest'")
    parts = urlsplit(empty_postgres_url)
    as_guest = parts._replace(netloc=f"guest:guest@{parts.hostname}:{parts.port}").geturl()

    with pytest.raises(SetupError, match=r"permission denied.*GRANT USAGE, CREATE ON SCHEMA public TO guest") as raised:
        migrate(as_guest)

    assert "\n" not in str(raised.value)
    execute(empty_postgres_url, "DROP ROLE guest")


def test_a_lock_held_too_long_ends_the_migration(empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.2)
    with psycopg.connect(empty_postgres_url) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [schema.LOCK])
        with pytest.raises(SetupError, match="another `clawloop migrate`"):
            migrate(empty_postgres_url)


def _checks(url: str) -> set[tuple[str, str]]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c'")
        return {(name, definition) for name, definition in found if not name.startswith("pg_")}


# One Temporal server runs a database's workflows; a second one is refused.


@pytest.fixture
def store(database: Database) -> TemporalServerStore:
    return TemporalServerStore(database)


async def prepares_nothing() -> None: ...


def last_seen(url: str, ago: timedelta) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE temporal_server SET seen_at = now() - %s", [ago])


def holder(url: str) -> Sequence[str]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT namespace_id FROM temporal_server")]


@pytest.fixture
async def told_url(postgres_stores: Stores, postgres_url: str) -> str:
    """The database, with a turn that waits, feedback and a policy; the workflows were told of all three."""
    turn = turn_record(api_key_id=postgres_stores.key)
    await postgres_stores.turns.insert(turn)
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "INSERT INTO feedback (id, turn_id, api_key_id, score, effect) VALUES (%s, %s, %s, 1, 'amends')",
            [new_feedback_id(), turn.turn_id, postgres_stores.key],
        )
    tell(postgres_url)
    return postgres_url


def tell(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE policies SET work_signalled_at = now()")
        connection.execute("UPDATE turns SET announced_at = now()")
        connection.execute("UPDATE feedback SET announced_at = now()")


def told(url: str) -> Sequence[int]:
    """Of how many policies, turns and pieces of feedback the workflows were told."""
    with psycopg.connect(url) as connection:
        counts = """SELECT (SELECT count(work_signalled_at) FROM policies), (SELECT count(announced_at) FROM turns),
            (SELECT count(announced_at) FROM feedback)"""
        ((policies, turns, feedback),) = connection.execute(counts).fetchall()
        return policies, turns, feedback


TOLD, FORGOTTEN = (1, 1, 1), (0, 0, 0)
WAITING = WaitingWork(sessions=1, turns=1, feedback=1)


async def test_what_waits_is_marked_once_for_each_server_that_is_lost(
    store: TemporalServerStore, told_url: str
) -> None:
    assert await store.hold("one") is None  # none was lost
    assert await store.hold("one") is None
    assert told(told_url) == TOLD
    assert await store.hold("two", formerly="one") == WAITING
    assert told(told_url) == FORGOTTEN
    tell(told_url)
    assert await store.hold("two", formerly="one") is None  # each orchestrator of a server does
    assert told(told_url) == TOLD
    last_seen(told_url, timedelta(minutes=2))
    assert await store.hold("three") == WAITING
    assert told(told_url) == FORGOTTEN
    tell(told_url)
    await store.release("three")
    assert await store.hold("three") is None
    assert told(told_url) == TOLD
    assert await store.take("four") == WAITING
    assert told(told_url) == FORGOTTEN
    tell(told_url)
    assert await store.take("four") is None
    assert told(told_url) == TOLD


async def test_a_signal_that_a_lost_server_took_is_not_marked_afterwards(
    store: TemporalServerStore, database: Database, postgres_stores: Stores, told_url: str
) -> None:
    """A gateway marks what it signalled some seconds ago: a later signal of its batch has waited for a dead server."""
    sweep = PostgresSweepStore(database)
    ((_, turn),) = await pending(sweep, told_url)
    ((_, feedback),) = await sweep.pending_feedback(timedelta(0), 10)
    await store.hold("one")
    await store.hold("two", formerly="one")

    async def mark_all(ago: timedelta) -> None:
        await postgres_stores.turns.mark_notified([turn.turn_id], ago)
        await sweep.mark_notified([turn.turn_id], ago)
        await postgres_stores.feedback.mark_feedback_notified(feedback.feedback_id, ago)
        await sweep.mark_feedback_notified([feedback.feedback_id], ago)

    await mark_all(ago=timedelta(seconds=3))
    assert told(told_url) == FORGOTTEN
    with psycopg.connect(told_url) as connection:
        connection.execute("UPDATE temporal_server SET forgotten_at = now() - interval '1 minute'")
    await mark_all(ago=timedelta(seconds=3))
    assert told(told_url)[1:] == TOLD[1:]


async def test_marking_waits_until_signals_are_forgotten(
    store: TemporalServerStore, database: Database, postgres_stores: Stores, told_url: str
) -> None:
    ((_, turn),) = await pending(PostgresSweepStore(database), told_url)
    await store.hold("one")
    with locked(told_url, "feedback"):  # what is forgotten last
        forgetting = asyncio.create_task(store.hold("two", formerly="one"))
        while not _waits(told_url, "UPDATE feedback"):
            await asyncio.sleep(0.01)
        marking = asyncio.create_task(postgres_stores.turns.mark_notified([turn.turn_id], timedelta(0)))
        while not _waits(told_url, "SELECT temporal_server.forgotten_at"):
            await asyncio.sleep(0.01)
    await asyncio.gather(forgetting, marking)
    assert told(told_url) == FORGOTTEN


async def pending(sweep: PostgresSweepStore, url: str) -> list[tuple[SessionFacts, TurnRecorded]]:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE turns SET announced_at = NULL")
        connection.execute("UPDATE feedback SET announced_at = NULL")
    return await sweep.pending_turns(timedelta(0), 10)


def _waits(url: str, query: str) -> bool:
    """True if a query that begins so waits for a lock."""
    with psycopg.connect(url) as connection:
        waiting = connection.execute(
            "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND starts_with(query, %s)", [query]
        )
        return waiting.fetchone() is not None


async def test_the_first_server_that_an_operator_takes_has_lost_nothing(
    store: TemporalServerStore, told_url: str
) -> None:
    assert await store.take("one") is None
    assert told(told_url) == TOLD


async def test_a_server_that_is_refused_marks_nothing(store: TemporalServerStore, told_url: str) -> None:
    await store.hold("one")
    with pytest.raises(SetupError):
        await store.hold("two")
    assert (holder(told_url), told(told_url)) == (["one"], TOLD)


async def test_orchestrators_that_notice_at_the_same_moment_mark_once(
    store: TemporalServerStore, told_url: str
) -> None:
    await store.hold("one")
    noticed = await asyncio.gather(*(store.hold("two", formerly="one") for _ in range(4)))
    assert sorted(noticed, key=str) == [None, None, None, WAITING]


async def test_of_two_servers_that_are_the_first_at_the_same_moment_one_is_refused(store: TemporalServerStore) -> None:
    results = await asyncio.gather(store.hold("one"), store.hold("two"), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["NoneType", "SetupError"]


async def test_the_old_server_is_named_until_everything_is_marked(store: TemporalServerStore, told_url: str) -> None:
    await store.hold("one")
    hurried = Database(told_url, timedelta(seconds=1))
    with locked(told_url, "feedback"):  # what is marked last
        with pytest.raises(StoreUnavailable):
            await TemporalServerStore(hurried).hold("two", formerly="one")
        assert (holder(told_url), told(told_url)) == (["one"], TOLD)
    await hurried.close()
    assert await store.hold("two", formerly="one") == WAITING
    assert (holder(told_url), told(told_url)) == (["two"], FORGOTTEN)


@contextmanager
def locked(url: str, table: str) -> Iterator[None]:
    """Others change no row meanwhile."""
    with psycopg.connect(url) as connection:
        connection.execute(f"SELECT FROM {table} FOR UPDATE")
        yield


async def test_a_second_server_is_refused_until_the_first_is_gone(
    store: TemporalServerStore, postgres_url: str
) -> None:
    await store.hold("one")
    await store.hold("one")  # each orchestrator of a server does
    with pytest.raises(
        SetupError, match=r"another Temporal server .*namespace one, seen \d+ s ago; this one is two.*or wait a minute"
    ):
        await store.hold("two")
    last_seen(postgres_url, timedelta(minutes=2))
    await store.hold("two")
    with pytest.raises(SetupError, match="namespace two"):
        await store.hold("one")
    assert holder(postgres_url) == ["two"]


async def test_a_clock_that_was_set_back_blocks_nobody(store: TemporalServerStore, postgres_url: str) -> None:
    await store.hold("one")
    last_seen(postgres_url, -timedelta(hours=1))
    await store.hold("two")
    assert holder(postgres_url) == ["two"]


async def test_a_start_waits_until_a_server_that_has_crashed_is_stale(
    store: TemporalServerStore, client: Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "LOOK_EVERY", timedelta(milliseconds=100))
    await store.hold("crashed")
    last_seen(postgres_url, timedelta(seconds=56))
    async with asyncio.timeout(60):
        await Holding(store, client, asyncio.Event(), prepares_nothing).begin()
    assert holder(postgres_url) == [await holding.namespace_id(client)]


async def test_a_start_on_a_server_that_lost_its_data_says_what_is_signalled_again(
    store: TemporalServerStore, client: Client, told_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await store.hold("before")
    await store.release("before")
    for _ in range(2):
        await Holding(store, client, asyncio.Event(), prepares_nothing).begin()
    assert told(told_url) == FORGOTTEN
    (said,) = [record.__dict__ for record in caplog.records if record.name == holding.__name__]
    assert "another server than before, or lost its data" in said["message"]
    assert said["levelname"] == "WARNING"
    assert (said["sessions"], said["turns"], said["feedback"]) == (1, 1, 1)


async def test_a_server_that_lost_its_data_goes_on_with_its_orchestrators(store: TemporalServerStore) -> None:
    await store.hold("before")
    await store.hold("after", formerly="before")
    await store.hold("after")


async def test_a_server_is_prepared_at_the_start_and_again_after_it_lost_its_data(
    store: TemporalServerStore, client: Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "RENEW_EVERY", timedelta(milliseconds=10))
    server, prepared, failing = ["one"], list[str](), list[Exception]()

    async def current(_: Client) -> str:
        return server[-1]

    async def prepare() -> None:
        prepared.append(server[-1])
        if failing:
            raise failing.pop()

    async def prepared_are(expected: list[str]) -> None:
        async with asyncio.timeout(60):
            while prepared != expected:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(holding, "namespace_id", current)
    held = Holding(store, client, asyncio.Event(), prepare)
    await held.begin()
    assert prepared == ["one"]
    keeping = asyncio.create_task(held.keep())
    try:
        await asyncio.sleep(0.2)
        assert prepared == ["one"]
        failing.append(RPCError("it starts", RPCStatusCode.UNAVAILABLE, b""))
        server.append("two")
        await prepared_are(["one", "two", "two"])
        await asyncio.sleep(0.2)
        assert prepared == ["one", "two", "two"]
        assert holder(postgres_url) == ["two"]
        assert not keeping.done()
    finally:
        keeping.cancel()


async def test_a_server_is_prepared_though_postgresql_does_not_answer_at_the_start(client: Client) -> None:
    prepared = asyncio.Event()

    async def prepare() -> None:
        prepared.set()

    away = Database("postgresql://nobody@127.0.0.1:1/nothing", timedelta(seconds=1))
    await Holding(TemporalServerStore(away), client, asyncio.Event(), prepare).begin()
    assert prepared.is_set()
    await away.close()


async def test_a_server_that_lost_its_data_is_prepared_though_postgresql_does_not_answer(
    store: TemporalServerStore, client: Client, told_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "RENEW_EVERY", timedelta(milliseconds=10))
    server, prepared = ["one"], list[str]()

    async def current(_: Client) -> str:
        return server[-1]

    async def prepare() -> None:
        prepared.append(server[-1])

    async def does_not_answer(*_: str, **__: str | None) -> None:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(holding, "namespace_id", current)
    held = Holding(store, client, asyncio.Event(), prepare)
    await held.begin()
    with monkeypatch.context() as away:
        away.setattr(store, "hold", does_not_answer)
        server.append("two")
        keeping = asyncio.create_task(held.keep())
        async with asyncio.timeout(60):
            while prepared != ["one", "two"]:
                await asyncio.sleep(0.01)
        assert (holder(told_url), told(told_url)) == (["one"], TOLD)
    # The next renewal does what that one could not.
    async with asyncio.timeout(60):
        while holder(told_url) != ["two"]:
            await asyncio.sleep(0.01)
    assert (told(told_url), prepared) == (FORGOTTEN, ["one", "two"])
    keeping.cancel()


async def test_an_orchestrator_ends_where_a_bug_ends_its_renewals() -> None:
    """After a minute without them another server could take the database."""

    async def renew() -> None:
        raise LookupError

    broken, renewals = asyncio.Event(), asyncio.create_task(renew())
    renewals.add_done_callback(partial(workers.end_if_renewals_fail, broken))
    async with asyncio.timeout(60):
        await broken.wait()
    stopped, broken = asyncio.create_task(asyncio.sleep(60)), asyncio.Event()
    stopped.add_done_callback(partial(workers.end_if_renewals_fail, broken))
    stopped.cancel()
    await asyncio.sleep(0.1)
    assert not broken.is_set()


async def test_an_orchestrator_that_stops_leaves_the_database_at_once(
    store: TemporalServerStore, postgres_url: str
) -> None:
    await store.hold("one")
    await store.release("two")  # not its own
    with pytest.raises(SetupError):
        await store.hold("two")
    await store.release("one")
    await store.hold("two")
    assert holder(postgres_url) == ["two"]


async def test_an_operator_may_say_that_the_other_server_is_gone(
    store: TemporalServerStore, database: Database, client: Client, told_url: str
) -> None:
    await store.hold("another")
    await take_database(database, client)
    assert holder(told_url) == [await holding.namespace_id(client)]
    assert told(told_url) == FORGOTTEN


async def test_the_orchestrator_of_a_second_server_does_not_start(
    store: TemporalServerStore, temporal_address: str, postgres_url: str, tmp_path: Path
) -> None:
    await store.hold("another")
    renewing = asyncio.create_task(_renew(store))
    environment = os.environ | {"DATABASE_URL": postgres_url, "TEMPORAL_ADDRESS": temporal_address}
    command = [sys.executable, "-m", "clawloop.app.cli.main", "worker", "orchestrator", "--data", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(120):
        said, _ = await process.communicate()
    renewing.cancel()
    assert process.returncode == 1
    assert "another Temporal server runs this database's workflows (namespace another" in said.decode()
    assert holder(postgres_url) == ["another"]


async def test_an_orchestrator_ends_where_another_server_took_the_database(
    store: TemporalServerStore, client: Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "RENEW_EVERY", timedelta(milliseconds=10))
    broken = asyncio.Event()
    held = Holding(store, client, broken, prepares_nothing)
    await held.begin()
    own = await holding.namespace_id(client)
    keeping = asyncio.create_task(held.keep())
    await store.take("another")
    async with asyncio.timeout(60):
        await broken.wait()
    await keeping
    await held.end()
    assert holder(postgres_url) == ["another"] != [own]


async def _renew(store: TemporalServerStore) -> None:
    """As the orchestrators of another server do."""
    while True:
        await store.hold("another")
        await asyncio.sleep(1)
