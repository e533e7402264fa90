"""Runs parts as child processes, restarts them, shows their status, and stops them in order."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clawloop.app.local.supervision import guard
from clawloop.app.processes.process_exit import die_with_parent
from clawloop.core.errors import SetupError

# Logs -----------------------------------------------------------------------------------------------------------------
# The log file of one part: appended to across starts, bounded in size, and searched for the last error.

# Two files of that size per part: enough for days of an engine's log, too little to fill a disk.
MAX_BYTES = 10 * 2**20
_TAIL_BYTES = 16_384
_ERROR = re.compile(r"(?:\w*Error|FATAL|PANIC|panic|fatal|cannot run)\b.*:")
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MAX_MESSAGE = 300  # characters: two lines on a screen


class PartLog:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._run_start = 0
        self._read_offset = 0

    def open_for_run(self) -> FileIO:
        """The file to give to a new process as its output. Moves a file that is too large to `NAME.log.1` first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > self._max_bytes:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        file = self.path.open("ab", buffering=0)  # append mode: after `rotate_if_large` truncates, writes go on at 0
        with suppress(OSError):  # a full disk keeps no part from starting
            file.write(f"--- started {datetime.now().astimezone().isoformat(timespec='seconds')}\n".encode())
        self._run_start = self._read_offset = file.tell()
        return file

    def rotate_if_large(self) -> None:
        """Copy the log of a running part to `NAME.log.1` and truncate it, once it is too large.

        The part has the file open, so it cannot be renamed. Output between copy and truncation is lost; on a full disk
        all of it is, since turns need the room more.
        """
        if not self.path.exists() or self.path.stat().st_size <= self._max_bytes:
            return
        copy = self.path.with_name(self.path.name + ".1")
        try:
            shutil.copyfile(self.path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
        os.truncate(self.path, 0)
        self._run_start = self._read_offset = 0

    def new_lines(self) -> Iterator[str]:
        """Complete lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read_offset)
            text = file.read(2**20)
        complete, newline, _ = text.rpartition(b"\n")
        self._read_offset += len(complete) + len(newline)
        for line in complete.splitlines():
            yield line.decode("utf-8", "replace")

    def last_message(self, any_line: bool = True) -> str:
        """The last line of this run that names an error; without one its last line, or "" if not `any_line`."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self._run_start, end - _TAIL_BYTES))
            text = _ANSI_COLOUR.sub("", file.read().decode("utf-8", "replace"))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.search(line)]
        message = _message_in((errors or (lines if any_line else []) or [""])[-1])
        return message if len(message) <= _MAX_MESSAGE else "…" + message[-_MAX_MESSAGE:]


def _message_in(line: str) -> str:
    """The message of a JSON log line, of a traceback its last line; another line as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or not isinstance(record.get("message"), str):
        return line
    said: str = record["exc_info"] if isinstance(record.get("exc_info"), str) else record["message"]
    return next((each.strip() for each in reversed(said.splitlines()) if each.strip()), line)


# Parts ----------------------------------------------------------------------------------------------------------------
# A part that the supervisor runs (supervisor.py), and its status.


@dataclass(frozen=True, slots=True)
class Launch:
    """Command line and environment of one start of a part.

    Args:
        environment: the whole environment; nothing is inherited.
        user: uid and gid to run as; None is the supervisor's.
        pass_fds: file descriptors of the supervisor that the program gets under the same numbers.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None
    user: tuple[int, int] | None = None
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times at which the supervisor checks and restarts a part.

    Args:
        first_delay, longest_delay: before a restart; doubles with each failure in a row.
        reset_after: a run that lasted that long resets the delay to `first_delay`.
        check_interval: between two health checks.
        unresponsive_after: a part that was ready and has not answered for that long is restarted. A minute, because
            an engine under full load answers late.
    """

    first_delay: timedelta = timedelta(seconds=0.5)
    longest_delay: timedelta = timedelta(seconds=30)
    reset_after: timedelta = timedelta(minutes=1)
    check_interval: timedelta = timedelta(seconds=2)
    unresponsive_after: timedelta = timedelta(minutes=1)

    def delay(self, failures_in_a_row: int) -> timedelta:
        """Delay before the restart after that many failures, at least one."""
        doublings = min(failures_in_a_row - 1, 20)  # 20: far past `longest_delay`, and no overflow
        return min(self.longest_delay, self.first_delay * float(2**doublings))


@dataclass(frozen=True, slots=True)
class Part:
    """A program that the supervisor starts, and restarts when it ends.

    Args:
        name: also the name of its log file.
        address: shown to people.
        prepare: called before each start, in a thread; it may block. Raises SetupError when the part cannot start.
        is_ready: health check. Returns False, and does not raise, when the part does not answer.
        stop_signal: requests an orderly stop.
        stop_within: after that the part and all its descendants are killed.
        start_within: a part that is not ready by then is killed and restarted.
        starting: what its start does and how long that usually takes, for people, until `progress` says more.
        progress: progress of the start as a log line reports it; None for other lines.
        restart: None: the supervisor's.
        roles: what it does, where its metrics are at `/metrics/ROLE` for each; empty: at `/metrics`.
    """

    name: str
    address: str
    prepare: Callable[[], Launch]
    is_ready: Callable[[], Awaitable[bool]]
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within: timedelta = timedelta(seconds=5)
    start_within: timedelta = timedelta(minutes=2)
    starting: str = ""
    progress: Callable[[str], str | None] | None = None
    restart: RestartPolicy | None = None
    roles: tuple[str, ...] = ()


class PartState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # ended; will be restarted
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # never became ready; not restarted any more
    EXTERNAL = "external"  # given by the operator, not supervised


@dataclass(frozen=True, slots=True)
class PartStatus:
    """State of a part.

    Args:
        detail: progress of its start, or why it ended.
        since: when this state began.
        restarts: number so far.
    """

    name: str
    state: PartState
    address: str
    detail: str
    since: datetime
    restarts: int


# Status ---------------------------------------------------------------------------------------------------------------
# Displays the status of the parts: a live table on a terminal, dated lines elsewhere.

_COLOURS = {
    PartState.STARTING: "yellow",
    PartState.READY: "green",
    PartState.WAITING: "red",
    PartState.STOPPING: "yellow",
    PartState.STOPPED: "dim",
    PartState.FAILED: "bold red",
    PartState.EXTERNAL: "cyan",
}
# Enough for a person; more would take processor time from the parts.
_DRAWS_PER_SECOND = 2


class Board(Protocol):
    """Displays status changes and messages."""

    def changed(self, status: PartStatus) -> None: ...

    def say(self, line: str) -> None: ...


class LineBoard:
    """Writes a dated line for every change."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def changed(self, status: PartStatus) -> None:
        self.say(describe(status))

    def say(self, line: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._print(f"{now} {line}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class TableBoard(LineBoard):
    """A table of all parts. Failures are also written above the table, where they stay."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._parts: dict[str, PartStatus] = {}

    def changed(self, status: PartStatus) -> None:
        self._parts[status.name] = status
        if status.state in (PartState.WAITING, PartState.FAILED):
            super().changed(status)

    def __rich__(self) -> RenderableType:
        if not self._parts:
            return Text()  # what fails before a part starts needs no head of a table
        restarted = any(status.restarts for status in self._parts.values())
        columns = ["part", "state", "address", "for", *(["restarts"] if restarted else [])]
        table = Table(*columns, box=None, pad_edge=False)
        now = datetime.now().astimezone()
        for status in self._parts.values():
            table.add_row(
                status.name,
                Text(status.state, style=_COLOURS[status.state]),
                Text(status.detail or status.address, overflow="fold"),
                _duration(int((now - status.since).total_seconds())),
                *([str(status.restarts or "")] if restarted else []),
            )
        return table


AnyBoard = TypeVar("AnyBoard", bound=LineBoard)


@contextmanager
def open_board(console: Console, lines: type[AnyBoard], table: type[AnyBoard]) -> Iterator[AnyBoard]:
    """A table on a terminal, else lines."""
    if not console.is_terminal:
        yield lines(console)
        return
    board = table(console)
    with Live(board, console=console, refresh_per_second=_DRAWS_PER_SECOND):  # type: ignore[arg-type]
        yield board


def describe(status: PartStatus) -> str:
    """The status as one line."""
    line = f"{status.name} {status.state}"
    if status.state in (PartState.READY, PartState.EXTERNAL):
        line += f" at {status.address}"
    if status.detail:
        line += f": {status.detail}"
    if status.restarts and status.state is PartState.READY:
        line += f" (restarts: {status.restarts})"
    return line


def _duration(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


# The supervisor -------------------------------------------------------------------------------------------------------
# Runs parts as child processes, restarts them, and stops them in order.
#
# Each part runs under a guard (guard.py) in its own session, so that Ctrl-C in the terminal reaches only the
# supervisor, and no process is left behind even when the supervisor is killed.

# On top of `stop_within`, which the guard enforces itself: for a guard that hangs.
GUARD_SECONDS = guard.ORPHAN_SECONDS + 0.5
# A part that was never ready fails for good: the reason is in its log, and more attempts only hide it.
ATTEMPTS_BEFORE_READY = 3


class Supervisor:
    """Args: logs: folder for `NAME.log`. changed: called with every new status of any part."""

    def __init__(self, logs: Path, changed: Callable[[PartStatus], None], policy: RestartPolicy | None = None) -> None:
        self._logs = logs
        self._changed = changed
        self._policy = policy or RestartPolicy()
        self._runs: dict[str, _Run] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def names(self) -> list[str]:
        """Names of all parts started so far."""
        return list(self._runs)

    def start(self, part: Part) -> None:
        """Start a part and return at once; `ready` waits for it."""
        log = PartLog(self._logs / f"{part.name}.log")
        run = _Run(part, log, self._changed, part.restart or self._policy)
        self._runs[part.name] = run
        run.task = asyncio.create_task(run.keep_running(), name=f"part {part.name}")
        run.task.add_done_callback(self._note_failure)

    async def ready(self, name: str) -> None:
        """Wait until a part has become ready for the first time.

        Raises:
            SetupError: this part or another part has failed for good before that.
        """
        ready = asyncio.create_task(self._runs[name].was_ready.wait())
        failed = asyncio.create_task(self.first_failure())
        try:
            await asyncio.wait((ready, failed), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await failed
        finally:
            ready.cancel()
            failed.cancel()

    async def all_ready(self) -> None:
        """Wait until every part started so far has become ready; raises as `ready` does."""
        await asyncio.gather(*(self.ready(name) for name in list(self._runs)))

    async def first_failure(self) -> None:
        """Raise the SetupError of the first part that fails for good; waits for ever if none does."""
        await asyncio.shield(self._failure)

    def kill(self, name: str) -> bool:
        """Kill a part's program with SIGKILL, as a crash would; False if it does not run."""
        return self._runs[name].kill()

    async def ready_again(self, name: str) -> None:
        """Wait until a part that was killed has been restarted and is ready."""
        await self._runs[name].is_ready.wait()

    async def stop(self, order: Sequence[Iterable[str]]) -> None:
        """Stop the parts group by group, those of a group in parallel. Unknown names are ignored."""
        for group in order:
            runs = [self._runs[name] for name in group if name in self._runs]
            await asyncio.gather(*(run.stop() for run in runs))

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failure.done() and (error := task.exception()) is not None:
            self._failure.set_exception(error)
            self._failure.exception()  # marks it retrieved: no task may be waiting, and the part's status shows it

    def kill_stopping(self) -> None:
        """Kill the parts that are being stopped, without waiting for `stop_within`."""
        for run in self._runs.values():
            if run.stopping:
                run.signal_guard(signal.SIGTERM)


class _Run:
    """One supervised part: its process, its restarts and its status."""

    def __init__(self, part: Part, log: PartLog, changed: Callable[[PartStatus], None], policy: RestartPolicy) -> None:
        self.part = part
        self.log = log
        self.was_ready = asyncio.Event()
        self.is_ready = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.stopping = False
        self._changed = changed
        self._policy = policy
        self._spawning: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._status: PartStatus | None = None

    async def keep_running(self) -> None:
        failures = 0
        while True:
            self._set_status(PartState.STARTING, self.part.starting)
            started_at = asyncio.get_running_loop().time()
            try:
                reason = await self._run_once()
            except SetupError as error:
                if not self.was_ready.is_set():  # before the first success the operator has to act
                    self._set_status(PartState.FAILED, str(error))
                    raise
                reason = str(error)
            except OSError as error:  # e.g. a full disk: a part that cannot start now may start later
                reason = error.strerror or str(error)
                if self._process is not None:
                    await self._process.wait()  # it has been told to end
            if self.stopping:
                return
            lasted = timedelta(seconds=asyncio.get_running_loop().time() - started_at)
            failures = 1 if self.was_ready.is_set() and lasted >= self._policy.reset_after else failures + 1
            if not self.was_ready.is_set() and failures >= ATTEMPTS_BEFORE_READY:
                self._set_status(PartState.FAILED, reason)
                raise SetupError(f"{self.part.name} failed to start {failures} times: {reason} (log: {self.log.path})")
            delay = self._policy.delay(failures)
            self._restarts += 1
            self._set_status(PartState.WAITING, f"{reason}; restart in {delay.total_seconds():g} s")
            await asyncio.sleep(delay.total_seconds())

    async def stop(self) -> None:
        """Stop the part and wait until none of its processes runs."""
        self.stopping = True
        if self._spawning is not None:  # a process cannot be signalled before it is spawned
            await asyncio.wait({self._spawning})
            if self._spawning.exception() is None:
                self._process = self._spawning.result()
        process = self._process
        if process is not None and process.returncode is None:
            self._set_status(PartState.STOPPING, "")
            await self._terminate(process)
        if self.task is not None:
            self.task.cancel()  # it may be waiting between two runs
            await asyncio.wait({self.task})
        if self._status is not None and self._status.state not in (PartState.FAILED, PartState.STOPPED):
            self._set_status(PartState.STOPPED, "")

    def kill(self) -> bool:
        if not self.is_ready.is_set() or self._process is None:
            return False
        try:
            children = psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return False
        if not children:
            return False
        # The guard adopts orphans of the program, which are younger.
        min(children, key=lambda child: child.create_time()).kill()
        self.is_ready.clear()
        return True

    def signal_guard(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _run_once(self) -> str:
        """Start the part and wait until it has ended; returns the reason."""
        self._spawning = asyncio.create_task(self._spawn())
        process = self._process = await asyncio.shield(self._spawning)
        exit_code = asyncio.create_task(process.wait())
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({exit_code, watch}, return_when=asyncio.FIRST_COMPLETED)
            if exit_code.done() or self.stopping:
                reason = describe_exit(await exit_code)
            else:
                reason = watch.result()  # it runs, but is not ready or does not answer
                await self._terminate(process)
            if process.returncode == -signal.SIGKILL:  # the guard itself may have been killed before it cleaned up
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            # The last line of a killed process explains nothing, unless it names an error.
            message = self.log.last_message(any_line=(process.returncode or 0) >= 0)
            return f"{reason}: {message}" if message else reason
        finally:
            watch.cancel()
            if process.returncode is None:  # this task is being cancelled
                process.send_signal(signal.SIGTERM)

    async def _spawn(self) -> asyncio.subprocess.Process:
        part = self.part
        launch = await asyncio.to_thread(part.prepare)
        with self.log.open_for_run() as output:
            return await asyncio.create_subprocess_exec(
                *guarded(launch.command, part.stop_signal, part.stop_within, launch.user, launch.pass_fds),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(launch.environment),
                cwd=launch.folder,
                pass_fds=launch.pass_fds,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    async def _watch(self) -> str:
        """Check the part's health; returns a reason to restart it, once there is one."""
        loop = asyncio.get_running_loop()
        part, policy = self.part, self._policy
        deadline = loop.time() + part.start_within.total_seconds()
        detail = ""
        while not await part.is_ready():
            if loop.time() >= deadline:
                return f"not ready after {part.start_within.total_seconds():g} s"
            for line in self.log.new_lines():
                progress = part.progress(line) if part.progress is not None else None
                if progress is not None and progress != detail:
                    detail = progress
                    self._set_status(PartState.STARTING, detail)
            self.log.rotate_if_large()
            await asyncio.sleep(min(0.2, policy.check_interval.total_seconds()))
        self.was_ready.set()
        self._set_status(PartState.READY, "")
        answered = loop.time()
        while loop.time() - answered < policy.unresponsive_after.total_seconds():
            await asyncio.sleep(policy.check_interval.total_seconds())
            self.log.rotate_if_large()
            if await part.is_ready():
                answered = loop.time()
        return f"no answer for {policy.unresponsive_after.total_seconds():g} s"

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGTERM)
        bound = self.part.stop_within.total_seconds() + GUARD_SECONDS
        try:
            await asyncio.wait_for(process.wait(), bound)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _set_status(self, state: PartState, detail: str) -> None:
        unchanged = self._status is not None and self._status.state is state
        since = self._status.since if unchanged and self._status is not None else datetime.now().astimezone()
        if state is PartState.READY:
            self.is_ready.set()
        else:
            self.is_ready.clear()
        self._status = PartStatus(self.part.name, state, self.part.address, detail, since, self._restarts)
        self._changed(self._status)


def guarded(
    command: Sequence[str],
    stop_signal: signal.Signals,
    grace: timedelta,
    user: tuple[int, int] | None = None,
    pass_fds: Sequence[int] = (),
) -> tuple[str, ...]:
    """The command line that runs a command under a guard; the guard itself must get `pass_fds`, too."""
    guard_command = [sys.executable, "-I", "-m", guard.__name__]
    guard_command += ["--grace", str(grace.total_seconds()), "--stop-signal", str(int(stop_signal))]
    if user is not None:
        guard_command += ["--user", f"{user[0]}:{user[1]}"]
    for descriptor in pass_fds:
        guard_command += ["--pass-fd", str(descriptor)]
    return (*guard_command, "--", *command)


def describe_exit(returncode: int) -> str:
    """The return code as text; a negative one is a signal, as in `subprocess`."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"
