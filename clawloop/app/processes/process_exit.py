"""Ends processes: without the interpreter's shutdown, and with their parent."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

# Exit -----------------------------------------------------------------------------------------------------------------
# Ends a process without the interpreter's shutdown, which native threads can crash.


def exit_process(code: int) -> NoReturn:
    """Flush logs and streams, and exit without Python's own shutdown. Call it when all files are closed.

    Native threads of Temporal and torch may call into an interpreter that is shutting down. The process then ends with
    SIGABRT, "terminate called without an active exception" or "PyGILState_Release: thread state must be current".
    Seen once in some hundred exits, on a busy machine.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if it was closed before the start, as by `… >&-`
            with suppress(BrokenPipeError):  # the reader is gone, as with `… | head`
                stream.flush()
    os._exit(code)


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Run a program and exit with the code that it passes to `sys.exit`, else with 0.

    Raises:
        Exception: not caught by the program; Python prints it.
    """
    try:
        run()
    except SystemExit as end:
        exit_process(_exit_code(end.code))
    exit_process(0)


def _exit_code(argument: str | int | None) -> int:
    """The exit code for an argument of `sys.exit`, as Python interprets it; prints a string."""
    if isinstance(argument, str):
        if sys.stderr is not None:
            sys.stderr.write(f"{argument}\n")
        return 1
    return argument or 0


# A parent's death -----------------------------------------------------------------------------------------------------
# Ends a child when its parent ends, even by kill -9 (PR_SET_PDEATHSIG).
#
# Linux only; elsewhere these functions do nothing, and a child survives a parent killed with -9.

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Loaded before any fork: between fork and exec a child should not import or allocate.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(sent: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child this signal when the thread that started it ends.

    The thread, not the process: start children from the main thread. Python calls a `preexec_fn` after changing the
    user, which would clear the setting.
    """
    parent = os.getpid()

    def set_death_signal() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os._exit(1)

    return set_death_signal


def end_with_parent(sent: signal.Signals) -> None:
    """Have the kernel send this process the signal when its parent ends; for a child started by foreign code."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0)
