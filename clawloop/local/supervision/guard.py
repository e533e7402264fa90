"""Stands between the supervisor and one child, so that nothing of the child outlives either.

Run as a program of its own, on Linux only:

    python -I -m clawloop.local.supervision.guard --grace SECONDS --stop-signal N [--user UID:GID] -- COMMAND…

vLLM's engine core and worker survive when their server is killed (seen: 2.3 GB left behind), and a supervisor killed
with SIGKILL cannot clean up. So the guard adopts every descendant and ends all of them when the child ends, on SIGTERM,
or when the supervisor is gone. A second SIGTERM ends the grace period at once. The guard ends as the child ended: with
the child's exit code or by its signal.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from clawloop.processes.parent_death import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
# What the child leaves behind has been told of the end already, or lost its head: no reason to wait long.
LEFT_BEHIND_SECONDS = 0.5
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with_child = die_with_parent(signal.Signals(options.stop_signal))

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        die_with_child()

    drop: dict[str, object] = {}
    if options.user:
        uid, gid = (int(number) for number in options.user.split(":"))
        drop = {"user": uid, "group": gid, "extra_groups": []}
    try:
        child = subprocess.Popen(options.command, preexec_fn=in_child, **drop)  # type: ignore[call-overload]
    except OSError as error:
        print(f"cannot run {options.command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 127
    status = _wait(child.pid, options.grace, options.stop_signal)
    _end_descendants()
    if os.WIFSIGNALED(status):
        _die_by(os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--stop-signal", type=int, required=True)
    parser.add_argument("--user")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _wait(child: int, grace: float, stop_signal: int) -> int:
    """The child's wait status, once it has ended; asks it to end when we are told to."""
    deadline: float | None = None
    while True:
        # Half a second only where a signal might have come before we looked; 50 ms once a deadline runs.
        got = signal.sigtimedwait(WATCHED, 0.5 if deadline is None else 0.05)
        status = _reap(child)
        if status is not None:
            return status
        if got is not None and got.si_signo != signal.SIGCHLD:
            if deadline is None:
                deadline = time.monotonic() + grace
                os.kill(child, stop_signal)
            else:
                deadline = time.monotonic()
        if deadline is not None and time.monotonic() >= deadline:
            for process in psutil.Process().children(recursive=True):
                _send(process, signal.SIGKILL)


def _reap(child: int) -> int | None:
    """Collect everything that has ended; the child's wait status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _end_descendants() -> None:
    deadline = time.monotonic() + LEFT_BEHIND_SECONDS
    told: set[int] = set()
    while left := psutil.Process().children(recursive=True):
        late = time.monotonic() >= deadline
        for process in left:
            if late or process.pid not in told:
                told.add(process.pid)
                _send(process, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)
        _reap(0)


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it went by itself
        process.send_signal(number)


def _die_by(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its core file, if it was to leave one
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
