"""A part that the supervisor runs (supervisor.py), and its status."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Launch:
    """Command line and environment of one start of a part.

    Args:
        environment: the whole environment; nothing is inherited.
        user: uid and gid to run as; None is the supervisor's.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None
    user: tuple[int, int] | None = None


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
        progress: progress of the start as a log line reports it; None for other lines.
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
