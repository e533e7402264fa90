"""Children that do not outlive us, even after kill -9.

Linux only: elsewhere nothing is arranged, and a child whose parent is killed with -9 stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Loaded before any fork: a child between fork and exec must not import or allocate much.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(sent: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child this signal when the thread that started it ends.

    The thread, not the process: start children from the main thread. Python runs it after the change of user,
    which would clear the setting.
    """
    parent = os.getpid()

    def arrange() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return arrange


def end_with_parent(sent: signal.Signals) -> None:
    """From now on the kernel sends this process the signal when its parent ends; for children we do not start."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0)
