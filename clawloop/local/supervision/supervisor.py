"""Runs parts as child processes, keeps them running, and ends them in order.

Knows nothing about what the parts are. Each runs under a guard (guard.py) in a session of its own, so that Ctrl-C
in the terminal reaches only us and nothing is left behind even when we are killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from clawloop.errors import SetupError
from clawloop.local.supervision import guard
from clawloop.local.supervision.part import Part, PartState, PartStatus
from clawloop.local.supervision.part_log import PartLog
from clawloop.processes.parent_death import die_with_parent

# The guard's own bound comes first; this is for a guard that cannot act any more.
GUARD_SECONDS = guard.LEFT_BEHIND_SECONDS + 0.5
# A part that never became ready will not: the reason is in its log, and waiting longer hides it.
ATTEMPTS_BEFORE_READY = 3


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits for what.

    Args:
        first, most: pause before a restart; doubles each time from one to the other.
        forgiven_after: so long in health, and the pauses start from `first` again.
        look_every: between two health checks.
        silent_for: a part that was ready and has not answered for that long hangs, and is restarted. A minute:
            an engine under full load answers late, but not that late.
    """

    first: timedelta = timedelta(seconds=0.5)
    most: timedelta = timedelta(seconds=30)
    forgiven_after: timedelta = timedelta(minutes=1)
    look_every: timedelta = timedelta(seconds=2)
    silent_for: timedelta = timedelta(minutes=1)

    def pause(self, failures_in_a_row: int) -> timedelta:
        """What to wait before starting again after that many failures, at least one."""
        doublings = min(failures_in_a_row - 1, 20)  # 20: far past `most`, and no overflow
        return min(self.most, self.first * float(2**doublings))


class Supervisor:
    """Args: logs: folder for `NAME.log`. changed: told of every change of any part's status."""

    def __init__(self, logs: Path, changed: Callable[[PartStatus], None], patience: Patience | None = None) -> None:
        self._logs = logs
        self._changed = changed
        self._patience = patience or Patience()
        self._runs: dict[str, _Run] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, part: Part) -> None:
        """Begin to run a part; `ready` tells when it is."""
        run = _Run(part, PartLog(self._logs / f"{part.name}.log"), self._changed, self._patience)
        self._runs[part.name] = run
        run.task = asyncio.create_task(run.keep_running(), name=f"part {part.name}")
        run.task.add_done_callback(self._note_failure)

    async def ready(self, name: str) -> None:
        """Wait until a part has become ready for the first time.

        Raises:
            SetupError: it, or another part, was given up before that.
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
        """Wait until every part begun so far has become ready; raises as `ready` does."""
        await asyncio.gather(*(self.ready(name) for name in list(self._runs)))

    async def first_failure(self) -> None:
        """Wait until some part has been given up, for ever if none is; raises its SetupError."""
        await asyncio.shield(self._failure)

    async def stop(self, order: Sequence[Iterable[str]]) -> None:
        """End parts, group after group, those of a group together. Unknown names are passed over."""
        for group in order:
            runs = [self._runs[name] for name in group if name in self._runs]
            await asyncio.gather(*(run.stop() for run in runs))

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failure.done() and (error := task.exception()) is not None:
            self._failure.set_exception(error)
            self._failure.exception()  # it may be that nobody asks: the part's status has said it

    def hurry(self) -> None:
        """End the patience of a stop in progress: what still runs is killed now."""
        for run in self._runs.values():
            if run.stopping:
                run.signal_guard(signal.SIGTERM)


class _Run:
    """One part while it is supervised."""

    def __init__(self, part: Part, log: PartLog, changed: Callable[[PartStatus], None], patience: Patience) -> None:
        self.part = part
        self.log = log
        self.was_ready = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.stopping = False
        self._changed = changed
        self._patience = patience
        self._spawning: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._status: PartStatus | None = None

    async def keep_running(self) -> None:
        failures = 0
        while True:
            self._say(PartState.STARTING, "")
            begun = asyncio.get_running_loop().time()
            try:
                reason = await self._run_once()
            except SetupError as error:
                if not self.was_ready.is_set():  # at the first start somebody is there to mend it
                    self._say(PartState.FAILED, str(error))
                    raise
                reason = str(error)
            if self.stopping:
                return
            lived = timedelta(seconds=asyncio.get_running_loop().time() - begun)
            failures = 1 if self.was_ready.is_set() and lived >= self._patience.forgiven_after else failures + 1
            if not self.was_ready.is_set() and failures >= ATTEMPTS_BEFORE_READY:
                self._say(PartState.FAILED, reason)
                raise SetupError(
                    f"{self.part.name} did not start, {failures} times: {reason} (all of it: {self.log.path})"
                )
            pause = self._patience.pause(failures)
            self._restarts += 1
            self._say(PartState.WAITING, f"{reason}; again in {pause.total_seconds():g} s")
            await asyncio.sleep(pause.total_seconds())

    async def stop(self) -> None:
        """End the part and wait until nothing of it runs."""
        self.stopping = True
        if self._spawning is not None:  # a process half started could not be told to end
            await asyncio.wait({self._spawning})
            if self._spawning.exception() is None:
                self._process = self._spawning.result()
        process = self._process
        if process is not None and process.returncode is None:
            self._say(PartState.STOPPING, "")
            await self._end(process)
        if self.task is not None:
            self.task.cancel()  # it may be between two runs
            await asyncio.wait({self.task})
        if self._status is not None and self._status.state not in (PartState.FAILED, PartState.STOPPED):
            self._say(PartState.STOPPED, "")

    def signal_guard(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _run_once(self) -> str:
        """Start the part and watch it until it has ended; returns why it ended."""
        self._spawning = asyncio.create_task(self._spawn())
        process = self._process = await asyncio.shield(self._spawning)
        exit_code = asyncio.create_task(process.wait())
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({exit_code, watch}, return_when=asyncio.FIRST_COMPLETED)
            if exit_code.done() or self.stopping:
                reason = how_it_ended(await exit_code)
            else:
                reason = watch.result()  # it runs, but not as it should
                await self._end(process)
            if process.returncode == -signal.SIGKILL:  # then its guard may have died before it could tidy up
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            # Of a part that was killed the last line says nothing, unless it names an error.
            words = self.log.last_words(any_line=(process.returncode or 0) >= 0)
            return f"{reason}: {words}" if words else reason
        finally:
            watch.cancel()
            if process.returncode is None:  # we are being cancelled
                process.send_signal(signal.SIGTERM)

    async def _spawn(self) -> asyncio.subprocess.Process:
        part = self.part
        launch = await asyncio.to_thread(part.prepare)
        with self.log.open_for_run() as output:
            return await asyncio.create_subprocess_exec(
                *guarded(launch.command, part.stop_signal, part.stop_within, launch.user),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(launch.environment),
                cwd=launch.folder,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    async def _watch(self) -> str:
        """Returns only when the part runs and yet is of no use: why."""
        loop = asyncio.get_running_loop()
        part, patience = self.part, self._patience
        deadline = loop.time() + part.start_within.total_seconds()
        detail = ""
        while not await part.is_ready():
            if loop.time() >= deadline:
                return f"not ready after {part.start_within.total_seconds():g} s"
            for line in self.log.new_lines():
                said = part.progress(line) if part.progress is not None else None
                if said is not None and said != detail:
                    detail = said
                    self._say(PartState.STARTING, detail)
            self.log.keep_bounded()
            await asyncio.sleep(min(0.2, patience.look_every.total_seconds()))
        self.was_ready.set()
        self._say(PartState.READY, "")
        answered = loop.time()
        while loop.time() - answered < patience.silent_for.total_seconds():
            await asyncio.sleep(patience.look_every.total_seconds())
            self.log.keep_bounded()
            if await part.is_ready():
                answered = loop.time()
        return f"no answer for {patience.silent_for.total_seconds():g} s"

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGTERM)
        bound = self.part.stop_within.total_seconds() + GUARD_SECONDS
        try:
            await asyncio.wait_for(process.wait(), bound)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _say(self, state: PartState, detail: str) -> None:
        before = self._status
        same = before is not None and before.state is state
        since = before.since if same and before is not None else datetime.now().astimezone()
        self._status = PartStatus(self.part.name, state, self.part.address, detail, since, self._restarts)
        self._changed(self._status)


def guarded(
    command: Sequence[str], stop_signal: signal.Signals, grace: timedelta, user: tuple[int, int] | None = None
) -> tuple[str, ...]:
    """The command line that runs a command under a guard."""
    own = [sys.executable, "-I", "-m", guard.__name__]
    own += ["--grace", str(grace.total_seconds()), "--stop-signal", str(int(stop_signal))]
    if user is not None:
        own += ["--user", f"{user[0]}:{user[1]}"]
    return (*own, "--", *command)


def how_it_ended(returncode: int) -> str:
    """A return code in words; negative ones are signals, as in `subprocess`."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"
