"""The memory of all processes of a sandbox, counted from outside, where no command can stop the counting.

`inside.py` counts each second, and keeps what a command left. This is for commands that stop it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

COUNT_SECONDS = 2.0
# So that the program inside, where it runs, is first, and has room to pack what was left.
SLACK = 1.25


async def exceeded(process: int, limit_bytes: int) -> None:
    """Return once this process and its descendants have far more memory of their own, together, than the limit."""
    while True:
        if await asyncio.to_thread(own_bytes, process) > SLACK * limit_bytes:
            return
        await asyncio.sleep(COUNT_SECONDS)


def own_bytes(process: int) -> int:
    """Memory that this process and its descendants share with no file; nothing of those that ended meanwhile."""
    page = os.sysconf("SC_PAGE_SIZE")
    used, found = 0, [process]
    while found:
        folder = Path("/proc") / str(found.pop())
        with suppress(OSError, ValueError):
            _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            used += (resident - shared) * page
            for thread in (folder / "task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return used
