"""Telling several workflows at once, so that one that cannot be told keeps no other from it.

Knows nothing about what they are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from activities.telling import AT_ONCE, MOST_STUCK
from clawloop.errors import AnnouncementFailed


async def tell_each(what: str, names: Iterable[str], tell: Callable[[str], Awaitable[None]]) -> None:
    """Call `tell` with each name; many at once, for each may take its whole limit where Temporal hangs.

    Raises:
        AnnouncementFailed: of those it names; the others were told, unless so many failed that it gave up.
    """
    failed: list[str] = []
    turns = asyncio.Semaphore(AT_ONCE)

    async def try_one(name: str) -> None:
        async with turns:
            if len(failed) > MOST_STUCK:
                return
            try:
                await tell(name)
            except AnnouncementFailed as error:
                failed.append(f"{what} {name}: {error}")

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(try_one(name))
    if failed:
        raise AnnouncementFailed("; ".join(sorted(failed)))
