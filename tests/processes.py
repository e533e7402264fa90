"""Looks at processes that may end at any time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run; a zombie does not."""
    running = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def by_name(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """The first process of each name; PostgreSQL's children may end meanwhile."""
    first: dict[str, psutil.Process] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            first.setdefault(process.name(), process)
    return first


def guarded_child(marker: str) -> psutil.Process:
    """The process under a guard, among this process's descendants, whose command line contains `marker`."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if marker in command and "clawloop.app.local.supervision.guard" not in command:
                return process
    raise AssertionError(f"no process has {marker!r} in its command line")
