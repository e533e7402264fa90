"""Processes of a benchmark that are killed by `kill -9` while it runs, and started again at the same address."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.processes import LOOPBACK, running, start_temporal, stop, temporal_ports, wait_for
from clawloop.app.local.services.postgres import EmbeddedPostgres, stop_postgres


@dataclass
class Program:
    """A program with a health page."""

    command: Sequence[str]
    log: Path
    ready: str
    variables: Mapping[str, str]
    stack: ExitStack
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.process = self.stack.enter_context(running(self.command, self.log, self.variables))
        wait_for(self.ready, self.process, self.log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class _Service:
    """A service, all of whose processes are killed.

    Args:
        stop: as it is stopped at the end.
    """

    def __init__(self, stop: Callable[[subprocess.Popen[bytes]], None], stack: ExitStack) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = stop
        stack.callback(self._end)

    def kill(self) -> None:
        assert self._process is not None
        _kill_family(self._process)

    def _end(self) -> None:
        if self._process is not None:
            self._stop(self._process)


class Postgres(_Service):
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(stop_postgres, stack)
        self.server = EmbeddedPostgres(folder)

    def start(self) -> None:
        process = self._process = self.server.prepare().popen()
        self.server.wait_ready(alive=lambda: process.poll() is None)


class Temporal(_Service):
    """Temporal's development server, whose database is a file."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(stop, stack)
        self._folder = folder
        self._ports = temporal_ports()
        self.address = f"{LOOPBACK}:{self._ports.main}"

    def start(self) -> None:
        self._process = start_temporal(self._folder, self._ports)


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, the first before it can react to the end of the others."""
    root = psutil.Process(process.pid)
    family = [root, *root.children(recursive=True)]
    for one in family:
        with suppress(psutil.NoSuchProcess):  # it may end with those before it
            one.kill()
    process.wait()
    psutil.wait_procs(family)


Part = Program | Postgres | Temporal
"""A part that can be killed, and started again; `start` returns once it is ready."""
