"""The embedded PostgreSQL, started for real in every situation it may find."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import psycopg
import pytest

from clawloop.errors import SetupError
from clawloop.local.services import postgres, service_user
from clawloop.local.services.postgres import EmbeddedPostgres, running

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become another user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="arranged with the Linux kernel")


@pytest.fixture(scope="module")
def once_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("postgres") / "data"
    with running(folder):
        pass
    return folder


@pytest.fixture
def data(once_made: Path, tmp_path: Path) -> Path:
    """A folder that a server ran on before; copying one is quicker than making one."""
    folder = tmp_path / "data"
    shutil.copytree(once_made, folder, symlinks=True)
    return folder


def ask(server: EmbeddedPostgres, query: str) -> Any:
    with psycopg.connect(server.url, autocommit=True) as connection:
        cursor = connection.execute(query)
        return cursor.fetchone() if cursor.description else None


def server_process(server: EmbeddedPostgres) -> psutil.Process:
    with psycopg.connect(server.url) as connection:
        parent = psutil.Process(connection.info.backend_pid).parent()
    assert parent is not None
    return parent


def test_data_survive_a_restart(data: Path) -> None:
    with running(data) as server:
        ask(server, "CREATE TABLE kept AS SELECT 1 AS one")
        assert ask(server, "SHOW server_encoding") == ("UTF8",)
    with running(data) as server:
        assert ask(server, "SELECT one FROM kept") == (1,)


def test_psql_gets_in_with_the_address_and_nobody_without_the_password(data: Path) -> None:
    with running(data) as server:
        psql = postgres._install_for(data / "cluster") / "bin/psql"
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
def test_root_runs_it_as_another_user_even_where_that_one_may_not_go(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    folder = closed / "data"

    with running(folder) as server:
        process = server_process(server)
        assert process.uids().real != 0
        assert process.uids().saved != 0
        assert process.gids().real != 0
        assert "\nGroups:\t \n" in Path(f"/proc/{process.pid}/status").read_text()
        assert (folder / "cluster").stat().st_uid == process.uids().real
    assert closed.stat().st_mode & 0o777 == 0o700


@as_root
def test_data_copied_by_root_change_hands(data: Path) -> None:
    with running(data):
        owner = (data / "cluster").stat().st_uid
    for path in [data / "cluster", *(data / "cluster").rglob("*")]:
        os.chown(path, 0, 0, follow_symlinks=False)

    with running(data) as server:
        assert ask(server, "SELECT 1") == (1,)
    assert (data / "cluster/base").stat().st_uid == owner


@as_root
def test_programs_where_the_user_may_not_go_are_copied_to_where_it_may(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = postgres._installs()[18].parent
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for part in (f"{package.name}.libs", f"{package.name}/pginstall18"):
        shutil.copytree(package.parent / part, closed / part, symlinks=True)
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    monkeypatch.setattr(postgres, "_installs", lambda: {18: closed / package.name / "pginstall18"})

    with tempfile.TemporaryDirectory(prefix="clawloop-test-", dir="/tmp") as reachable:
        Path(reachable).chmod(0o755)
        monkeypatch.setattr(service_user, "_COPIES", Path(reachable))
        with running(data) as server:
            assert Path(server_process(server).exe()).is_relative_to(reachable)
        with running(data) as server:  # the copy serves again
            assert ask(server, "SELECT 1") == (1,)
        assert len(list(Path(reachable).iterdir())) == 1

        # Somebody else's folder of that name is not trusted.
        os.chown(reachable, 65534, 65534)
        monkeypatch.setattr(tempfile, "gettempdir", lambda: reachable)
        user = service_user.service_user(data / "cluster")
        assert user is not None
        assert not service_user._only_ours(next(Path(reachable).iterdir()))


class Killed(NamedTuple):
    server: psutil.Process
    folder: Path


@pytest.fixture
def killed(data: Path) -> Iterator[Killed]:
    """A server whose parent was killed a moment ago."""
    program = (
        "import sys, time, pathlib\n"
        "from clawloop.local.services.postgres import running\n"
        "with running(pathlib.Path(sys.argv[1])) as server:\n"
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
def test_it_does_not_outlive_a_parent_that_was_killed(killed: Killed) -> None:
    killed.server.wait(10)


@on_linux
def test_a_new_start_waits_for_the_old_server_to_end(killed: Killed) -> None:
    with running(killed.folder) as server:
        assert ask(server, "SELECT 1") == (1,)


def test_a_pid_file_of_a_server_that_is_gone_does_not_matter(data: Path) -> None:
    with running(data) as server:
        kept = (data / "cluster/postmaster.pid").read_text()
        owner = server_process(server).uids().real
    # Its number now belongs to another program of the same user: PostgreSQL alone would not start.
    user = owner if os.geteuid() == 0 else None
    with subprocess.Popen(["/bin/sleep", "60"], user=user) as other:
        lines = kept.split("\n")
        (data / "cluster/postmaster.pid").write_text("\n".join([str(other.pid), *lines[1:]]))
        with running(data) as server:
            assert ask(server, "SELECT 1") == (1,)
        other.kill()


def test_a_folder_in_use_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_LEFT_OVER_SECONDS", 0.2)
    with running(data), pytest.raises(SetupError, match=r"already runs on .* stop the other clawloop"):
        EmbeddedPostgres(data).prepare()


def test_after_kill_9_it_starts_again_with_what_was_committed(data: Path) -> None:
    server = EmbeddedPostgres(data)
    process = server.prepare().popen()
    server.wait_ready()
    ask(server, "CREATE TABLE kept AS SELECT 1 AS one")
    process.kill()
    process.wait()

    process = server.prepare().popen()
    server.wait_ready(alive=lambda: process.poll() is None)
    assert ask(server, "SELECT one FROM kept") == (1,)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_an_interrupted_first_start_is_made_good(tmp_path: Path) -> None:
    (tmp_path / "cluster.new/base").mkdir(parents=True)
    (tmp_path / "password.new").write_text("torn")
    with running(tmp_path) as server:
        assert ask(server, "SELECT 1") == (1,)


def test_data_of_the_older_postgres_in_the_wheel_stay_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installs = postgres._installs()
    with monkeypatch.context() as only_older:
        only_older.setattr(postgres, "_installs", lambda: {16: installs[16]})
        with running(tmp_path):
            pass
    with running(tmp_path) as server:
        assert ask(server, "SELECT current_setting('server_version_num')::int / 10000") == (16,)


def test_data_of_another_postgres_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/PG_VERSION").write_text("15\n")
    with pytest.raises(SetupError, match="made by PostgreSQL 15, here are 18 and 16: dump it"):
        EmbeddedPostgres(tmp_path).prepare()
    assert [path.name for path in (tmp_path / "cluster").iterdir()] == ["PG_VERSION"]


def test_a_port_in_use_is_one_clear_line(data: Path, tmp_path: Path) -> None:
    with running(data) as server, pytest.raises(SetupError, match=f"port {server.port} .* in use"):
        EmbeddedPostgres(tmp_path / "other", server.port).prepare()


def test_too_little_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(SetupError, match=r"only 10 MiB free .* needs 256"):
        EmbeddedPostgres(tmp_path).prepare()


def test_a_lost_password_is_said(data: Path) -> None:
    with running(data):
        pass
    (data / "password").unlink()
    with pytest.raises(SetupError, match="password is missing: put it back"):
        EmbeddedPostgres(data).prepare()


def test_a_server_that_ends_at_once_is_not_waited_for(data: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SetupError, match="ended at once; its log says why"), running(data, settings={"no_such": "1"}):
        pass
    assert time.monotonic() - began < 20
