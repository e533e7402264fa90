"""Processes that tests look at while they come and go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that has ended and was not waited for does not."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended while we asked
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def by_name(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """The first of each name; PostgreSQL's own children come and go while we ask."""
    found: dict[str, psutil.Process] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found.setdefault(process.name(), process)
    return found
