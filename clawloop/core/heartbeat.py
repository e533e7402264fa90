"""Sends heartbeats while an activity works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio import activity


@asynccontextmanager
async def heartbeating(progress: Callable[[], object] | None = None) -> AsyncIterator[None]:
    """Send a heartbeat at half the heartbeat time-out while the block runs. Does nothing outside an activity.

    If sending fails, the block is cancelled and the heartbeat's error raised; the block's own error is never hidden.

    Args:
        progress: what the activity is doing now; shown in Temporal's UI, so nothing of a conversation. The next attempt
            finds the last one in `activity.info().heartbeat_details`.
    """
    limit = activity.info().heartbeat_timeout if activity.in_activity() else None
    if limit is None:
        yield
        return
    working = asyncio.current_task()
    assert working is not None
    beating = asyncio.create_task(_beat(limit / 2, progress))
    beating.add_done_callback(lambda beat: None if beat.cancelled() else working.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if beating.done() and not beating.cancelled():
            beating.result()
        raise
    finally:
        beating.cancel()


async def _beat(interval: timedelta, progress: Callable[[], object] | None) -> None:
    while True:
        activity.heartbeat(*([] if progress is None else [progress()]))
        await asyncio.sleep(interval.total_seconds())
