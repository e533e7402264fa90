"""Ends a child when its parent ends, even by kill -9 (PR_SET_PDEATHSIG).

Linux only; elsewhere these functions do nothing, and a child survives a parent killed with -9.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

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
