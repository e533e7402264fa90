"""Runs parts as child processes, restarts them, and stops them in order.

Each part runs under a guard (guard.py) in its own session, so that Ctrl-C in the terminal reaches only the supervisor,
and no process is left behind even when the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from clawloop.errors import SetupError
from clawloop.local.supervision import guard
from clawloop.local.supervision.part import Part, PartState, PartStatus, RestartPolicy
from clawloop.local.supervision.part_log import PartLog
from clawloop.processes.parent_death import die_with_parent

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
            self._set_status(PartState.STARTING, "")
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
