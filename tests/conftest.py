"""Shared fixtures: PostgreSQL and Temporal, each started once a session, and databases without rows."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services import temporal_server
from clawloop.app.local.services.postgres import EmbeddedPostgres, running_postgres
from clawloop.app.local.supervision.supervisor import guarded
from db.schema import migrate
from db.tables import Base

_numbers = itertools.count()
_resets = itertools.count()

# Deleted rows stay in a table's file until it is truncated.
TRUNCATED_EVERY = 50
SERVER_SETTINGS = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}

# No deadline: a busy machine is not a failure. The same examples each time: what fails has been changed, not drawn.
# `make quick ARGS="--hypothesis-profile searching"` draws others.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile("patient")

# Two workers have two cores: threads of torch that wait for each other would take them from the other worker. Before
# any test imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A trainer computes in what others leave idle. Beside two busy workers that is next to nothing, so tests yield as it
# does, within their session as among the sessions of the machine.
os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), 10))
with suppress(OSError):  # no autogroup here
    Path("/proc/self/autogroup").write_text("10", encoding="ascii")
# A person's own instances are none of the tests', nor are theirs the person's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="clawloop-state-")

# What starts services or processes, or has models, if tiny ones.
PATIENT_FOLDERS = {"api", "local", "training", "workflows"}

# Fixtures that are the URL of an engine which tests share (tests/e2e/conftest.py).
ENGINE_FIXTURES = {"engine_url", "careless_engine_url", "toy_engine_url", "strict_engine_url"}

# `make test` runs two workers, each with a PostgreSQL and a Temporal of its own, as session fixtures are per worker. A
# worker takes a whole file at a time, so that the file's fixtures are made once. All files that share an engine are one
# piece of work, so that one worker alone starts engines. That piece is the first; then come the folders that take
# longest, and at the end files of seconds, so that both workers have something to do until the end.
ENGINE_LANE = "engines"
LONGEST_FOLDERS = ("e2e", "chaos", "demo", "training", "workflows", "api", "local", "deploy", "security", "ui")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _deselect_what_needs_cuda(config, items)
    for item in items:
        if "postgres_server" in getattr(item, "fixturenames", ()) or _runs_on_postgres(item):
            item.add_marker(pytest.mark.postgres)
        if PATIENT_FOLDERS & set(item.path.parts):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (_lane(item.path) != ENGINE_LANE, _place(item.path)))


def _runs_on_postgres(item: pytest.Item) -> bool:
    """Whether a fixture's parameter says so: its stores are those in PostgreSQL, not those in memory."""
    call = getattr(item, "callspec", None)
    return call is not None and any(value in ("postgres", "encrypted") for value in call.params.values())


@cache
def _lane(path: Path) -> str:
    """The piece of work that a file of tests is in. The scheduler knows no fixtures, so the file's text says it."""
    names = "|".join(sorted(ENGINE_FIXTURES))
    shares = "e2e" in path.parts and re.search(rf"\b({names}): str\b", path.read_text(encoding="utf-8"))
    return ENGINE_LANE if shares else str(path)


def _deselect_what_needs_cuda(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without CUDA, deselect the tests that need it: a skipped test would fail in CI."""
    on_cuda = [item for item in items if item.get_closest_marker("gpu")]
    if not on_cuda:
        return
    from torch import cuda

    if not cuda.is_available():
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_cuda)


def _place(path: Path) -> int:
    """Place of a file's folder in `LONGEST_FOLDERS`; after all of them if it is not there."""
    return next((place for place, folder in enumerate(LONGEST_FOLDERS) if folder in path.parts), len(LONGEST_FOLDERS))


class LaneScheduling(LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile`, where files may share a piece of work. `loadgroup` has no effect with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return _lane(self.config.rootpath / nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling:
    return LaneScheduling(config, log)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skipped test fails the run, in whichever worker it was skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # None in a worker
    if os.environ.get("CI") and reporter is not None and exitstatus == 0 and reporter.stats.get("skipped"):
        reporter.write_line("\na test was skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _ports_of_this_worker() -> Iterator[None]:
    """Free ports are of a range of this worker, below those that the kernel gives to outgoing connections.

    Otherwise another worker, or any connection, could take a port after it was chosen and before its server listens.
    """
    size = 4_000
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 3
    # Another run of tests on this machine has the same ranges, and begins elsewhere.
    numbers = itertools.count(os.getpid())

    def free_port(host: str = "127.0.0.1") -> int:
        while True:
            port = 20_000 + worker * size + next(numbers) % size
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family) as probe, suppress(OSError):
                probe.bind((host, port))
                return port

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clawloop.app.local.checks._free_port", free_port)
        yield


@pytest.fixture(scope="session", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """Each HTTP client of httpx reads the file of certificate authorities, which takes longer than many a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssl.create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_inserts() -> Iterator[None]:
    """A busy machine sends no turn to the spool, where a gateway runs in the tests' process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.recording.insert_queue.LIMIT_SECONDS", 30)
        yield


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server without fsync: its data is thrown away after the tests. Rows stay in the order of their insertion."""
    folder: Path = tmp_path_factory.mktemp("postgres")
    with running_postgres(folder, settings=SERVER_SETTINGS) as server:
        yield server


@pytest.fixture(scope="session")
def migrated_url(postgres_server: EmbeddedPostgres) -> str:
    execute(postgres_server.url, "CREATE DATABASE migrated")
    url = database_address(postgres_server.url, "migrated")
    migrate(url)
    return url


@pytest.fixture
def postgres_url(migrated_url: str) -> str:
    """A migrated database without rows; tests must not change its schema.

    Deleting takes a tenth of the 300 ms of TRUNCATE, which makes the files of all tables and indexes anew.
    """
    tables = ", ".join(Base.metadata.tables)
    with psycopg.connect(migrated_url, options="-c lock_timeout=60s") as connection:
        if next(_resets) % TRUNCATED_EVERY:
            connection.execute(f"LOCK TABLE {tables}")
            connection.execute("SET LOCAL session_replication_role = replica")  # neither foreign keys nor triggers
            connection.execute("; ".join(f"DELETE FROM {table}" for table in Base.metadata.tables))
            connection.execute("SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'")
        else:
            connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
    return migrated_url


@pytest.fixture(scope="session")
def temporal_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of Temporal's development server, with the flags of `clawloop up`."""
    folder = tmp_path_factory.mktemp("temporal")
    ports = temporal_server.Ports(*(choose_port("Temporal", temporal_server.HOST, 0, "") for _ in range(3)))
    started = temporal_server.launch(folder, ports, os.environ)
    command = guarded(started.command, signal.SIGTERM, timedelta(seconds=3))
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=dict(started.environment), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not asyncio.run(temporal_server.is_ready(ports.http)):
                assert time.monotonic() < deadline, (folder / "server.log").read_text()[-2000:]
                time.sleep(0.1)
            yield f"{temporal_server.HOST}:{ports.main}"
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def empty_postgres_url(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """A new database without tables."""
    name = f"test{next(_numbers)}"
    execute(postgres_server.url, f"CREATE DATABASE {name}")
    yield database_address(postgres_server.url, name)
    execute(postgres_server.url, f"DROP DATABASE {name} WITH (FORCE)")


def database_address(url: str, name: str) -> str:
    """URL of another database on the same server."""
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
