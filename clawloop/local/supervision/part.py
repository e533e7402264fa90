"""One supervised part of `clawloop up`, and what is known about it while it runs.

Knows nothing about how parts are run: see supervisor.py.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a process once.

    Args:
        environment: all of it; nothing is inherited.
        user: uid and gid to run as; None is our own.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None
    user: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A program to run and keep running.

    Args:
        name: also the name of its log file.
        address: where people or other parts find it.
        prepare: all that comes before a start, each time; blocking, runs in a thread. Raises SetupError when it
            cannot be started.
        is_ready: asks the part itself; False while it is not. Must not raise for a part that is away.
        stop_signal: what makes it end in good order.
        stop_within: after that it is killed, with everything it started.
        start_within: a part that is not ready by then is killed and started again.
        progress: what a line of its log says about its start, or None.
    """

    name: str
    address: str
    prepare: Callable[[], Launch]
    is_ready: Callable[[], Awaitable[bool]]
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within: timedelta = timedelta(seconds=5)
    start_within: timedelta = timedelta(minutes=2)
    progress: Callable[[str], str | None] | None = None


class PartState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # it ended and will be started again
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # it never became ready; we gave up
    EXTERNAL = "external"  # given by the operator, not run by us


@dataclass(frozen=True, slots=True)
class PartStatus:
    """How a part is.

    Args:
        detail: what it is doing, or why it ended.
        since: when this state began.
        restarts: so far.
    """

    name: str
    state: PartState
    address: str
    detail: str
    since: datetime
    restarts: int
