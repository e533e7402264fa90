"""One Temporal server runs a database's workflows; a second one is refused."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from clawloop.app.processes import holding, workers
from clawloop.app.processes.holding import Holding, take_database
from clawloop.core.contracts.sessions import WaitingWork
from clawloop.core.errors import SetupError, StoreUnavailable
from clawloop.core.ids import new_feedback_id
from db.database import Database
from db.temporal_server import TemporalServerStore
from tests.contract.conftest import Stores
from tests.records import turn_record
from tests.workflows.conftest import client

__all__ = ["client"]


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
