"""The embedded PostgreSQL and Temporal: real servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import psycopg
import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from clawloop.app.cli.operations import TemporalProbe
from clawloop.app.local import checks, parts
from clawloop.app.local.checks import choose_port
from clawloop.app.local.services import postgres, temporal_server
from clawloop.app.local.services import postgres as postgres_module
from clawloop.app.local.services.postgres import EmbeddedPostgres, running_postgres
from clawloop.app.local.supervision.supervisor import PartState, Supervisor
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import AWAY, TemporalWatch
from clawloop.core.errors import SetupError
from clawloop.core.settings import Settings
from clawloop.operations.overview import NO_TEMPORAL
from tests.local.status_recorder import StatusRecorder

# The embedded PostgreSQL: real servers on new, old, copied, damaged and locked folders.

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes to another user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")


@pytest.fixture(scope="module")
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("postgres") / "data"
    with running_postgres(folder):
        pass
    return folder


@pytest.fixture
def data(new_cluster: Path, tmp_path: Path) -> Path:
    """A folder that a server has run on; a copy, because initdb takes longer."""
    folder = tmp_path / "data"
    shutil.copytree(new_cluster, folder, symlinks=True)
    return folder


def query_one(server: EmbeddedPostgres, query: str) -> Any:
    with psycopg.connect(server.url, autocommit=True) as connection:
        cursor = connection.execute(query)
        return cursor.fetchone() if cursor.description else None


def server_process(server: EmbeddedPostgres) -> psutil.Process:
    with psycopg.connect(server.url) as connection:
        parent = psutil.Process(connection.info.backend_pid).parent()
    assert parent is not None
    return parent


def test_data_survives_a_restart(data: Path) -> None:
    with running_postgres(data) as server:
        query_one(server, "CREATE TABLE kept AS SELECT 1 AS one")
        assert query_one(server, "SHOW server_encoding") == ("UTF8",)
    with running_postgres(data) as server:
        assert query_one(server, "SELECT one FROM kept") == (1,)


def test_the_log_quotes_no_row_and_no_statement(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running_postgres(data) as server:
        query_one(server, "CREATE TABLE said (words text CHECK (length(words) < 5))")
        with pytest.raises(psycopg.errors.CheckViolation):
            query_one(server, "INSERT INTO said VALUES ('zebrasay')")
    logged = capfd.readouterr().err
    assert "violates check constraint" in logged
    assert "zebrasay" not in logged


def test_psql_connects_with_the_url_and_a_wrong_password_is_rejected(data: Path) -> None:
    with running_postgres(data) as server:
        psql = postgres._installation() / "bin/psql"
        query = [str(psql), server.url, "--tuples-only", "--command", "SELECT 'in'"]
        assert subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() == "in"

        guess = server.url.replace("clawloop:", "clawloop:x")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(guess)
        assert (data / "password").stat().st_mode & 0o777 == 0o600
        assert (data / "cluster").stat().st_mode & 0o077 == 0
        assert {used.laddr.ip for used in server_process(server).net_connections("inet")} == {"127.0.0.1"}
        assert server_process(server).net_connections("unix") == []


@as_root
@on_linux
def test_root_runs_it_as_another_user_in_a_folder_closed_to_that_user(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    folder = closed / "data"

    with running_postgres(folder) as server:
        process = server_process(server)
        assert process.uids().real != 0
        assert process.uids().saved != 0
        assert process.gids().real != 0
        assert "\nGroups:\t \n" in Path(f"/proc/{process.pid}/status").read_text()
        assert (folder / "cluster").stat().st_uid == process.uids().real
    assert closed.stat().st_mode & 0o777 == 0o700


@as_root
def test_data_copied_by_root_gets_its_owner_back(data: Path) -> None:
    with running_postgres(data):
        owner = (data / "cluster").stat().st_uid
    for path in [data / "cluster", *(data / "cluster").rglob("*")]:
        os.chown(path, 0, 0, follow_symlinks=False)

    with running_postgres(data) as server:
        assert query_one(server, "SELECT 1") == (1,)
    assert (data / "cluster/base").stat().st_uid == owner


@as_root
def test_programs_that_the_user_cannot_reach_are_copied(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = postgres._installation().parent
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for part in (f"{package.name}.libs", f"{package.name}/pginstall18"):
        shutil.copytree(package.parent / part, closed / part, symlinks=True)
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    monkeypatch.setattr(postgres, "_installation", lambda: closed / package.name / "pginstall18")

    with tempfile.TemporaryDirectory(prefix="clawloop-test-", dir="/tmp") as reachable:
        Path(reachable).chmod(0o755)
        monkeypatch.setattr(postgres_module, "_COPIES", Path(reachable))
        with running_postgres(data) as server:
            assert Path(server_process(server).exe()).is_relative_to(reachable)
        with running_postgres(data) as server:  # reuses the copy
            assert query_one(server, "SELECT 1") == (1,)
        assert len(list(Path(reachable).iterdir())) == 1

        # A folder owned by another user is not trusted.
        os.chown(reachable, 65534, 65534)
        monkeypatch.setattr(tempfile, "gettempdir", lambda: reachable)
        user = postgres_module.service_user(data / "cluster")
        assert user is not None
        assert not postgres_module._written_by_root_alone(next(Path(reachable).iterdir()))


class Killed(NamedTuple):
    server: psutil.Process
    folder: Path


@pytest.fixture
def killed(data: Path) -> Iterator[Killed]:
    """A server whose parent has just been killed."""
    program = (
        "import sys, time, pathlib\n"
        "from clawloop.app.local.services.postgres import running_postgres\n"
        "with running_postgres(pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(data)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    with psycopg.connect(url) as connection:
        process = psutil.Process(connection.info.backend_pid).parent()
    assert process is not None
    parent.kill()
    parent.wait()
    parent.stdout.close()
    yield Killed(process, data)
    if process.is_running():
        process.kill()


@on_linux
def test_the_server_ends_when_its_parent_is_killed(killed: Killed) -> None:
    killed.server.wait(60)


@on_linux
def test_a_new_start_waits_for_the_old_server_to_end(killed: Killed) -> None:
    with running_postgres(killed.folder) as server:
        assert query_one(server, "SELECT 1") == (1,)


def test_a_stale_pid_file_is_removed(data: Path) -> None:
    with running_postgres(data) as server:
        pid_file = (data / "cluster/postmaster.pid").read_text()
        owner = server_process(server).uids().real
    # The pid now belongs to another program of the same user: PostgreSQL by itself would refuse to start.
    user = owner if os.geteuid() == 0 else None
    with subprocess.Popen(["/bin/sleep", "60"], user=user) as other:
        lines = pid_file.split("\n")
        (data / "cluster/postmaster.pid").write_text("\n".join([str(other.pid), *lines[1:]]))
        with running_postgres(data) as server:
            assert query_one(server, "SELECT 1") == (1,)
        other.kill()


def test_a_folder_in_use_is_rejected(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_LEFT_OVER_SECONDS", 0.2)
    with running_postgres(data), pytest.raises(SetupError, match=r"already runs on .* stop the other clawloop"):
        EmbeddedPostgres(data).prepare()


def test_committed_data_survives_kill_9(data: Path) -> None:
    server = EmbeddedPostgres(data)
    process = server.prepare().popen()
    server.wait_ready()
    query_one(server, "CREATE TABLE kept AS SELECT 1 AS one")
    process.kill()
    process.wait()

    process = server.prepare().popen()
    server.wait_ready(alive=lambda: process.poll() is None)
    assert query_one(server, "SELECT one FROM kept") == (1,)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_an_interrupted_first_start_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "cluster.new/base").mkdir(parents=True)
    (tmp_path / "password.new").write_text("torn")
    with running_postgres(tmp_path) as server:
        assert query_one(server, "SELECT 1") == (1,)


def test_data_of_an_unsupported_version_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/PG_VERSION").write_text("15\n")
    with pytest.raises(SetupError, match="created by PostgreSQL 15, installed is 18: dump it"):
        EmbeddedPostgres(tmp_path).prepare()
    assert [path.name for path in (tmp_path / "cluster").iterdir()] == ["PG_VERSION"]


def test_a_port_in_use_is_reported(data: Path, tmp_path: Path) -> None:
    with running_postgres(data) as server, pytest.raises(SetupError, match=f"port {server.port} .* in use"):
        EmbeddedPostgres(tmp_path / "other", server.port).prepare()


def test_too_little_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(SetupError, match=r"256 MiB of free disk are needed .* 10 MiB are free"):
        EmbeddedPostgres(tmp_path).prepare()


def test_a_missing_password_file_is_reported(data: Path) -> None:
    with running_postgres(data):
        pass
    (data / "password").unlink()
    with pytest.raises(SetupError, match="password is missing: restore it"):
        EmbeddedPostgres(data).prepare()


def test_wait_ready_does_not_wait_for_a_server_that_has_ended(data: Path) -> None:
    began = time.monotonic()
    with (
        pytest.raises(SetupError, match="ended during its start; see its log"),
        running_postgres(data, settings={"no_such": "1"}),
    ):
        pass
    assert time.monotonic() - began < 20


# Temporal's development server: it keeps its data when killed, and closed workflows for 30 days.


async def retention_days(address: str) -> float:
    client = await Client.connect(address)
    described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    return described.config.workflow_execution_retention_ttl.seconds / 86400


async def terminated_by_a_page(port: int, host: str) -> int:
    """The status of what any page in the user's browser may send without asking, or under a rebound name."""
    terminate = f"http://127.0.0.1:{port}/api/v1/namespaces/default/workflows/kept/terminate"
    headers = {"Host": f"{host}:{port}", "Origin": "https://evil.example", "Content-Type": "text/plain"}
    async with httpx.AsyncClient(timeout=60) as client:
        return (await client.post(terminate, content=b"{}", headers=headers)).status_code


async def test_a_started_workflow_survives_the_kill_of_its_server(tmp_path: Path) -> None:
    ports = temporal_server.Ports(*(checks.choose_port("Temporal", "127.0.0.1", 0, "") for _ in range(3)))
    statuses = StatusRecorder()
    supervisor = Supervisor(tmp_path / "logs", statuses)
    address = f"127.0.0.1:{ports.main}"
    try:
        supervisor.start(parts.temporal(tmp_path / "temporal", ports, os.environ))
        await supervisor.ready("temporal")
        assert await retention_days(address) == 30
        assert await parts.answers_ok(f"http://127.0.0.1:{ports.ui}")
        client = await Client.connect(address)
        started = await client.start_workflow("Anything", id="kept", task_queue="nobody")
        assert [await terminated_by_a_page(ports.http, host) for host in ("127.0.0.1", "evil.example")] == [403, 403]
        children = psutil.Process().children(recursive=True)
        server = next(p for p in children if p.name() == "temporal" and str(tmp_path) in " ".join(p.cmdline()))
        server.kill()
        await statuses.until("temporal", PartState.READY, times=2)
        described = await (await Client.connect(address)).get_workflow_handle("kept").describe()
        assert described.run_id == started.result_run_id
        assert await retention_days(address) == 30
    finally:
        await supervisor.stop([["temporal"]])
    with closing(sqlite3.connect(tmp_path / "temporal" / "temporal.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_failed_workflow_tasks_are_tried_again_within_seconds(tmp_path: Path) -> None:
    """By default the server waits up to ten minutes, and training with it."""
    command = temporal_server.launch(tmp_path, temporal_server.Ports(1, 2, 3), {}).command
    assert ("--dynamic-config-value", 'history.workflowTaskRetryMaxInterval="5s"') in pairwise(command)


async def test_is_ready_is_false_where_nothing_listens() -> None:
    port = checks.choose_port("Temporal", "127.0.0.1", 0, "")
    assert not await temporal_server.is_ready(port)


# Whether Temporal answers, as pages and `status` tell it.


async def _until(watch: TemporalWatch, problem: str | None) -> None:
    async with asyncio.timeout(60):
        while await watch.problem() != problem:
            await asyncio.sleep(0.01)


async def test_a_server_that_answers_is_no_problem(temporal_address: str, tmp_path: Path) -> None:
    watch = TemporalWatch(await connect(temporal_address, lazy=True), every_seconds=0.01)
    watch._answers = False
    async with watch:
        await _until(watch, None)
    probe = TemporalProbe(Settings.model_validate({"TEMPORAL_ADDRESS": temporal_address, "data": tmp_path}))
    assert await probe.problem() is None


async def test_one_that_does_not_is_told(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{choose_port('Temporal', '127.0.0.1', 0, '')}"
    async with TemporalWatch(await connect(nowhere, lazy=True), every_seconds=0.01) as watch:
        await _until(watch, AWAY)
    async with TemporalWatch(None) as none:
        assert await none.problem() == NO_TEMPORAL
    probe = TemporalProbe(Settings.model_validate({"TEMPORAL_ADDRESS": nowhere, "data": tmp_path}))
    assert await probe.problem() == f"Temporal does not answer at {nowhere}"
    # On a machine that knows the database alone nobody says where Temporal is.
    assert await TemporalProbe(Settings.model_validate({"data": tmp_path})).problem() is None
