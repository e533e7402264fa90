"""How a process of ours ends."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """End this process without Python's own shutdown, its work being done and its files closed.

    Threads that Python does not know, Temporal's and torch's, may call into an interpreter that is half gone; then a
    process that has done all its work ends with SIGABRT, "terminate called without an active exception" or
    "PyGILState_Release: thread state must be current". It is seen once in some hundred ends, on a busy machine.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # else it was closed before we began, as by `… >&-`
            with suppress(BrokenPipeError):  # of `… | head`
                stream.flush()
    os._exit(code)


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Run a program to its end, then leave with the code that it asked for by `sys.exit`.

    Raises:
        Exception: what the program does not catch, for Python to print.
    """
    try:
        run()
    except SystemExit as end:
        exit_process(_code(end.code))
    exit_process(0)


def _code(asked: str | int | None) -> int:
    """As Python reads what was given to `sys.exit`."""
    if isinstance(asked, str):
        if sys.stderr is not None:
            sys.stderr.write(f"{asked}\n")
        return 1
    return asked or 0
