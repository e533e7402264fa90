"""The memory of all processes of a sandbox, counted from outside, where no command can stop the counting.

`inside.py` counts each second, and keeps what a command left. This is for commands that stop it. Like that it leaves
out memory that processes share with each other.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from clawloop.errors import SandboxFailed

COUNT_SECONDS = 2.0
# Factor of the limit, so that the program inside has room to pack the artifact.
SLACK = 1.25
# Counts in a row above the limit: between two of them the program inside, if it runs, ends the command itself.
COUNTS = 2


async def exceeded(process: int, limit_bytes: int) -> None:
    """Return once this process and its descendants have had far more memory of their own, together, than the limit.

    Raises:
        SandboxFailed: it cannot be counted.
    """
    counts = 0
    while counts < COUNTS:
        await asyncio.sleep(COUNT_SECONDS)
        try:
            used = await asyncio.to_thread(own_bytes, process)
        except RuntimeError as error:  # no thread can be started
            raise SandboxFailed(f"the memory of a sandbox cannot be counted: {error}") from error
        counts = counts + 1 if used > SLACK * limit_bytes else 0


def own_bytes(process: int) -> int:
    """Memory that this process and its descendants share with no file; nothing of those that ended meanwhile."""
    page = os.sysconf("SC_PAGE_SIZE")
    used, found = 0, [process]
    while found:
        folder = Path("/proc") / str(found.pop())
        with suppress(OSError, ValueError):
            _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            used += (resident - shared) * page
        with suppress(OSError):
            threads = list((folder / "task").iterdir())
            for thread in threads:
                with suppress(OSError):  # it ends meanwhile
                    found += map(int, (thread / "children").read_text().split())
    return used
