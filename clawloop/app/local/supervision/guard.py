"""Runs one child of the supervisor, and ends all its descendants when the child or the supervisor ends.

A program, for Linux only:

    python -I -m clawloop.app.local.supervision.guard --grace SECONDS --stop-signal N [--user UID:GID] \
        [--pass-fd N]… -- COMMAND…

vLLM's engine core and worker survive when their server is killed (seen: 2.3 GB left behind), and a supervisor killed
with SIGKILL cannot clean up. So the guard is the subreaper of every descendant, and ends all of them when the child
ends, on SIGTERM, or when the supervisor is gone. A second SIGTERM skips the rest of the grace period. The guard exits
as the child did: with its exit code or by its signal.
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

from clawloop.app.processes.process_exit import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
# From SIGTERM to SIGKILL of descendants that outlive the child: it has stopped them already, or has crashed.
ORPHAN_SECONDS = 0.5
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with_child = die_with_parent(signal.Signals(options.stop_signal))

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        die_with_child()

    identity: dict[str, object] = {}
    if options.user:
        uid, gid = (int(number) for number in options.user.split(":"))
        identity = {"user": uid, "group": gid, "extra_groups": []}
    try:
        child = subprocess.Popen(  # type: ignore[call-overload]
            options.command, preexec_fn=in_child, pass_fds=options.pass_fd, **identity
        )
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
    parser.add_argument("--pass-fd", type=int, action="append", default=[])
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _wait(child: int, grace: float, stop_signal: int) -> int:
    """The child's wait status, once it has ended; forwards a request to stop as `stop_signal`."""
    deadline: float | None = None
    while True:
        # 50 ms while a deadline runs; else half a second, for a SIGCHLD that came before this wait.
        received = signal.sigtimedwait(WATCHED, 0.5 if deadline is None else 0.05)
        status = _reap(child)
        if status is not None:
            return status
        if received is not None and received.si_signo != signal.SIGCHLD:
            if deadline is None:
                deadline = time.monotonic() + grace
                os.kill(child, stop_signal)
            else:
                deadline = time.monotonic()
        if deadline is not None and time.monotonic() >= deadline:
            for process in psutil.Process().children(recursive=True):
                _send(process, signal.SIGKILL)


def _reap(child: int) -> int | None:
    """Reap every ended process; returns the child's wait status if it is among them."""
    child_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return child_status
        if pid == 0:
            return child_status
        if pid == child:
            child_status = status


def _end_descendants() -> None:
    deadline = time.monotonic() + ORPHAN_SECONDS
    signalled: set[int] = set()
    while descendants := psutil.Process().children(recursive=True):
        late = time.monotonic() >= deadline
        for process in descendants:
            if late or process.pid not in signalled:
                signalled.add(process.pid)
                _send(process, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)
        _reap(0)


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        process.send_signal(number)


def _die_by(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped its own core; the guard's is of no use
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
