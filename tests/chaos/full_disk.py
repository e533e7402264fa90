"""A folder without room: its disk is filled, or files of our processes cannot grow."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.chaos.stack import RANK, Stack


@asynccontextmanager
async def full_disk(stack: Stack, folder: Path) -> AsyncIterator[None]:
    """No room on the folder's disk if it has one of its own; else no process of ours can make a file longer."""
    if os.path.ismount(folder):
        filler = folder / "filler"
        try:
            await asyncio.to_thread(_fill_disk, filler)
            yield
        finally:
            filler.unlink(missing_ok=True)
        return
    processes = [process for part in (*stack.ours, RANK) for process in stack.processes(part)]
    before = [(process.pid, _limit_files(process.pid, (0, resource.RLIM_INFINITY))) for process in processes]
    try:
        yield
    finally:
        for pid, limits in before:
            _limit_files(pid, limits)


def _fill_disk(filler: Path) -> None:
    # Without a buffer: what others write meanwhile leaves no room for it, and closing the file would raise.
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 4096):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def _limit_files(pid: int, limits: tuple[int, int]) -> tuple[int, int]:
    try:
        return resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    except ProcessLookupError:
        return limits
