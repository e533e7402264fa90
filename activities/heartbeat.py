"""A heartbeat beside an activity's work. Knows nothing about the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio import activity


@asynccontextmanager
async def heartbeating(at: Callable[[], str] | None = None) -> AsyncIterator[None]:
    """Beat at half the heartbeat time-out while the block runs. Does nothing outside an activity.

    Should the beat itself break, the work is cancelled and the beat's error raised; it never hides the work's own.

    Args:
        at: what the work is at, in words that may cross Temporal; shown in its UI.
    """
    limit = activity.info().heartbeat_timeout if activity.in_activity() else None
    if limit is None:
        yield
        return
    working = asyncio.current_task()
    assert working is not None
    beating = asyncio.create_task(_beat(limit / 2, at))
    beating.add_done_callback(lambda ended: None if ended.cancelled() else working.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if beating.done() and not beating.cancelled():
            beating.result()
        raise
    finally:
        beating.cancel()


async def _beat(every: timedelta, at: Callable[[], str] | None) -> None:
    while True:
        activity.heartbeat(*([] if at is None else [at()]))
        await asyncio.sleep(every.total_seconds())
