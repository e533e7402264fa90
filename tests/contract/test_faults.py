"""PostgreSQL down, unresponsive or killed, and statements that fail."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnRecord
from clawloop.core.errors import RecordUnusable, StoreUnavailable
from clawloop.core.ids import ApiKeyId, new_api_key_id
from db import database as database_module
from db.database import CHAT_LIMIT, Database
from db.schema import migrate
from db.serving.directory import PostgresDirectoryStore, ensure_policy
from db.serving.keys import PostgresKeyStore
from db.turns.insert import PostgresTurnStore
from tests.chaos.proxy import Proxy
from tests.contract.conftest import TEST_LIMIT, Stores
from tests.records import turn_record

# PostgreSQL down, unresponsive or killed, and statements that fail.

pytestmark = pytest.mark.slow
LIMIT = timedelta(milliseconds=500)


class OwnServer:
    """A server for one test, which may do with it what it likes."""

    def __init__(self, folder: Path) -> None:
        self.embedded = EmbeddedPostgres(folder)
        self.process: subprocess.Popen[bytes] = self.start()
        migrate(self.embedded.url)

    def start(self) -> subprocess.Popen[bytes]:
        self.process = self.embedded.prepare().popen()
        self.embedded.wait_ready(alive=lambda: self.process.poll() is None)
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Keep all connections open and stop responding."""
        server = psutil.Process(self.process.pid)
        family = [server, *server.children(recursive=True)]
        for process in family:
            process.suspend()
        try:
            yield
        finally:
            for process in family:
                process.resume()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[OwnServer]:
    server = OwnServer(tmp_path)
    yield server
    server.process.send_signal(signal.SIGINT)
    server.process.wait(60)


async def a_key(database: Database) -> ApiKeyId:
    await ensure_policy(database, "default", "tiny", [])
    key, _ = await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "test")
    return key.id


async def test_stored_turns_survive_kill_9(own_server: OwnServer) -> None:
    patient = Database(own_server.embedded.url, TEST_LIMIT)
    key = await a_key(patient)
    store = PostgresTurnStore(patient)
    stored: list[TurnRecord] = []
    refused: list[TurnRecord] = []

    async def chat(number: int) -> None:
        evidence = SessionEvidence(SessionSource.HEADER, f"chat {number}")
        while not refused:
            record = turn_record(api_key_id=key, evidence=evidence)
            try:
                await store.insert(record)
            except StoreUnavailable:
                refused.append(record)
            else:
                stored.append(record)

    chats = [asyncio.create_task(chat(number)) for number in range(4)]
    async with asyncio.timeout(60):
        while len(stored) <= 20:
            await asyncio.sleep(0.02)
    own_server.kill()
    await asyncio.gather(*chats)
    own_server.start()

    afresh = PostgresTurnStore(patient)
    assert len(stored) > 20
    for record in stored:
        found = await afresh.load(record.turn_id)
        assert found is not None
        assert found.record == record
    for record in refused:  # it may have been committed; inserting is idempotent
        await store.insert(record)
        assert await afresh.load(record.turn_id) is not None
    await patient.close()


async def test_an_unresponsive_server_costs_no_more_than_the_limit(own_server: OwnServer) -> None:
    patient = Database(own_server.embedded.url, TEST_LIMIT)
    late = turn_record(api_key_id=await a_key(patient))
    await patient.close()
    database = Database(own_server.embedded.url, LIMIT)
    store = PostgresTurnStore(database)
    await _until_entered(store, turn_record(api_key_id=late.api_key_id))

    with own_server.silenced():
        ours, callers = [], []
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.5 s"):
                await store.insert(late)
            ours.append(time.monotonic() - began)
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(TimeoutError):  # a caller with a limit of its own is let go as well
                async with asyncio.timeout(0.2):
                    await store.insert(late)
            callers.append(time.monotonic() - began)
        # The best of them: a busy machine may stop for a second at any of them.
        assert min(ours) < 2
        assert min(callers) < 2

    await _until_entered(store, late)
    await database.close()


async def test_an_unreachable_server_fails_at_once() -> None:
    port = choose_port("nobody", "127.0.0.1", 0, "")
    database = Database(f"postgresql://nobody:nothing@127.0.0.1:{port}/none", LIMIT)
    took = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await PostgresTurnStore(database).insert(turn_record())
        with pytest.raises(StoreUnavailable):
            await PostgresKeyStore(database).authenticate("cl-00000000-" + "A" * 43)
        with pytest.raises(StoreUnavailable):
            await PostgresDirectoryStore(database).read()
        took.append(time.monotonic() - began)

    assert min(took) < 2  # the best: a busy machine may stop for a second
    await database.close()


async def test_a_wrong_password_is_not_an_unusable_record(postgres_url: str) -> None:
    database = Database(postgres_url.replace("clawloop:", "clawloop:not-"), TEST_LIMIT)
    with pytest.raises(StoreUnavailable, match="password authentication failed"):
        await PostgresTurnStore(database).insert(turn_record())
    await database.close()


async def test_options_in_the_url_are_kept(postgres_url: str) -> None:
    database = Database(f"{postgres_url}?options=-c%20work_mem%3D7MB", TEST_LIMIT)

    async def settings(connection: AsyncConnection) -> tuple[object, ...]:
        query = "SELECT current_setting('work_mem'), current_setting('statement_timeout'), current_setting('timezone')"
        return tuple((await connection.execute(text(query))).one())

    assert await database.run(settings) == ("7MB", "18s", "UTC")
    await database.close()


async def test_connections_cut_by_the_server_are_replaced(
    database: Database, postgres_stores: Stores, postgres_url: str
) -> None:
    await postgres_stores.turns.insert(turn_record(api_key_id=postgres_stores.key))
    async with asyncio.TaskGroup() as group:  # several connections are open now
        for _ in range(4):
            group.create_task(database.run(lambda connection: connection.execute(text("SELECT pg_sleep(0.05)"))))
    await asyncio.to_thread(_cut_connections, postgres_url)

    for _ in range(6):
        await postgres_stores.turns.insert(turn_record(api_key_id=postgres_stores.key))


async def test_only_a_connection_that_lay_in_the_pool_for_a_while_is_asked_whether_it_lives(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    ask = database_module.ask

    async def count(connection: psycopg.AsyncConnection[Any]) -> None:
        asked.append(connection)
        await ask(connection)

    monkeypatch.setattr(database_module, "ask", count)
    database = Database(postgres_url, timedelta(seconds=30))
    try:
        monkeypatch.setattr(database_module, "_IDLE_SECONDS", 3600.0)
        assert [await database.run(_answer) for _ in range(3)] == [1] * 3
        assert len(asked) == 0
        monkeypatch.setattr(database_module, "_IDLE_SECONDS", 0.0)
        assert [await database.run(_answer) for _ in range(3)] == [1] * 3
        assert len(asked) == 3
    finally:
        await database.close()


async def test_a_lost_network_fails_only_who_is_in_a_transaction(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pooled connections fall silent, one of them within a transaction that holds a lock."""
    unanswered: list[object] = []
    ask = database_module.ask

    async def note(connection: psycopg.AsyncConnection[Any]) -> None:
        try:
            await ask(connection)
        except TimeoutError:
            unanswered.append(connection)
            raise

    monkeypatch.setattr(database_module, "ask", note)
    address = urlsplit(postgres_url)
    assert address.port is not None
    port = choose_port("a proxy", "127.0.0.1", 0, "")
    proxied = address._replace(netloc=address.netloc.replace(f":{address.port}", f":{port}")).geturl()
    together, locked = asyncio.Barrier(6), asyncio.Event()

    async def meet(connection: AsyncConnection) -> None:
        await together.wait()
        await connection.execute(text("SELECT 1"))

    async def lock(connection: AsyncConnection) -> None:
        await connection.execute(text("SELECT pg_advisory_xact_lock(7001)"))
        locked.set()
        await asyncio.Event().wait()

    database = Database(proxied, timedelta(seconds=30))
    limited = Database(proxied, timedelta(seconds=4))
    try:
        async with Proxy(address.port, port) as proxy:
            await asyncio.gather(*(database.run(meet) for _ in range(6)))
            holding = asyncio.create_task(limited.run(lock))
            await locked.wait()
            proxy.silence()
            with pytest.raises(StoreUnavailable):
                await holding
            # The server ends that transaction by itself; until then nobody else has its lock.
            with psycopg.connect(postgres_url) as other:
                await asyncio.to_thread(other.execute, "SET lock_timeout = '60s'; SELECT pg_advisory_xact_lock(7001)")
            assert await limited.run(_answer) == 1
            # The first finds one silent, so none of the five others is asked.
            assert ([await database.run(_answer) for _ in range(6)], len(unanswered)) == ([1] * 6, 1)
    finally:
        await database.close()
        await limited.close()


async def _answer(connection: AsyncConnection) -> int:
    return int((await connection.execute(text("SELECT 1"))).scalar_one())


async def test_a_locked_row_costs_no_more_than_the_limit(postgres_stores: Stores, postgres_url: str) -> None:
    impatient = Database(postgres_url, LIMIT)
    named = SessionEvidence(SessionSource.HEADER, "x")
    await postgres_stores.turns.insert(turn_record(api_key_id=postgres_stores.key, evidence=named))
    waiting = turn_record(api_key_id=postgres_stores.key, evidence=named)

    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT * FROM sessions FOR UPDATE")
        with pytest.raises(StoreUnavailable):
            await PostgresTurnStore(impatient).insert(waiting)

    assert not (await postgres_stores.turns.insert(waiting)).duplicate
    await impatient.close()


async def test_a_database_without_tables_is_a_transient_error(empty_postgres_url: str) -> None:
    database = Database(empty_postgres_url, TEST_LIMIT)
    with pytest.raises(StoreUnavailable, match="clawloop migrate"):
        await PostgresTurnStore(database).insert(turn_record())
    await database.close()


async def test_a_turn_of_an_unknown_key_is_unusable(postgres_stores: Stores) -> None:
    with pytest.raises(RecordUnusable, match="api_key_id"):
        await postgres_stores.turns.insert(turn_record(api_key_id=new_api_key_id()))


async def test_a_bug_is_not_translated(database: Database) -> None:
    with pytest.raises(ProgrammingError):
        await database.run(lambda connection: connection.execute(text("SELEKT 1")))


@pytest.mark.parametrize(
    "statement",
    [
        "DO $$ BEGIN RAISE unique_violation USING MESSAGE = 'the rule', DETAIL = 'whispered'; END $$",
        "DO $$ BEGIN RAISE internal_error USING MESSAGE = 'the rule', DETAIL = 'whispered'; END $$",
        "DO $$ BEGIN RAISE insufficient_privilege USING MESSAGE = 'the rule', DETAIL = 'whispered'; END $$",
        "DO $$ BEGIN RAISE idle_in_transaction_session_timeout USING MESSAGE = 'the rule', HINT = 'whispered'; END $$",
        "DO $$ BEGIN RAISE feature_not_supported USING MESSAGE = 'the rule: cached plan', HINT = 'whispered'; END $$",
    ],
)
async def test_only_the_primary_message_of_postgres_is_repeated(database: Database, statement: str) -> None:
    with pytest.raises((RecordUnusable, StoreUnavailable), match="the rule") as raised:
        await database.run(lambda connection: connection.execute(text(statement)))
    assert "whispered" not in "".join(traceback.format_exception(raised.value))
    assert isinstance(raised.value, RecordUnusable) == ("unique" in statement)


async def test_a_bug_does_not_print_the_values(database: Database) -> None:
    told = {"word": "".join(("whis", "pered"))}  # or the traceback would quote it from this file
    with pytest.raises(ProgrammingError) as raised:
        await database.run(lambda connection: connection.execute(text("SELEKT :word"), told))
    assert "whispered" not in "".join(traceback.format_exception(raised.value))


def _cut_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        # Waits until they are gone, up to a minute.
        connection.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def _until_entered(store: PostgresTurnStore, record: TurnRecord) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await store.insert(record)
            except StoreUnavailable:
                await asyncio.sleep(0.1)
            else:
                return


def test_a_transaction_is_limited_even_in_a_pipeline_that_never_ends(postgres_url: str) -> None:
    """The caller is stopped in the middle of one, and its lock is free before it goes on."""
    command = [sys.executable, "-c", OPEN_PIPELINE, postgres_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        try:
            assert caller.stdout is not None
            pid = int(caller.stdout.readline())
            caller.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 60
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                while connection.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone() is not None:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
        finally:
            caller.kill()


OPEN_PIPELINE = """
import asyncio, sys
from datetime import timedelta
from db.database import Database

async def never_ends(connection):
    raw = (await connection.get_raw_connection()).driver_connection
    async with raw.pipeline():
        await raw.execute("SELECT 1")
        raw.pgconn.send_flush_request()
        raw.pgconn.flush()
        print(raw.info.backend_pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(Database(sys.argv[1], timedelta(seconds=2)).run(never_ends))
"""


# What a lost network costs the pool of a gateway, whose limit is shorter than a connection's time to answer.

POOLED = 3
POOL_LIMIT = 4 * CHAT_LIMIT


def test_a_gateways_limit_is_shorter_than_a_connections_time_to_answer() -> None:
    assert CHAT_LIMIT < POOL_LIMIT < timedelta(seconds=database_module._ANSWER_SECONDS)


async def test_each_silent_connection_of_a_gateways_pool_costs_one_transaction_its_limit(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_IDLE_SECONDS", 0.0)  # they lay in the pool for long enough
    address = urlsplit(postgres_url)
    assert address.port is not None
    port = choose_port("a proxy", "127.0.0.1", 0, "")
    proxied = address._replace(netloc=address.netloc.replace(f":{address.port}", f":{port}")).geturl()
    together = asyncio.Barrier(POOLED)

    async def meet(connection: AsyncConnection) -> None:
        await together.wait()
        await connection.execute(text("SELECT 1"))

    async def answered() -> bool:
        try:
            await database.run(_select)
        except StoreUnavailable:
            return False
        return True

    # A gateway's is a quarter of it; here the first connections must not fail on a busy machine.
    database = Database(proxied, POOL_LIMIT)
    try:
        async with Proxy(address.port, port) as proxy:
            await asyncio.gather(*(database.run(meet) for _ in range(POOLED)))
            proxy.silence()
            assert [await answered() for _ in range(POOLED)] == [False] * POOLED
            async with asyncio.timeout(60):
                while not await answered():  # at once, but on a busy machine
                    pass
    finally:
        await database.close()


async def _select(connection: AsyncConnection) -> None:
    await connection.execute(text("SELECT 1"))
