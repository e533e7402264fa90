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
        progress: progress of the start as a log line reports it; None for other lines.
        restart: None: the supervisor's.
    """

    name: str
    address: str
    prepare: Callable[[], Launch]
    is_ready: Callable[[], Awaitable[bool]]
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within: timedelta = timedelta(seconds=5)
    start_within: timedelta = timedelta(minutes=2)
    progress: Callable[[str], str | None] | None = None
    restart: RestartPolicy | None = None


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
