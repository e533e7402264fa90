"""Ends a process without the interpreter's shutdown, which native threads can crash."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


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
