"""A judge that shares a real engine with chats is answered while they fill it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from clawloop.app.layout.memory import chats_of_gateway
from tests.e2e.shared_engine import SEQS, Chats, sequences, vote

CHOICES = 8
FULL = SEQS // CHOICES
"""Chats that fill the engine."""
LONG = 4000
"""Tokens of a reply that does not end before the test cancels it."""


@asynccontextmanager
async def talking(chats: Chats, count: int, tokens: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many chats; what is left of them at the end is cancelled, which aborts their sequences."""
    tasks = [asyncio.create_task(chats.chat(key, tokens, CHOICES, stream=False)) for key in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_chats_leave_sequences_for_the_judge(engine_url: str) -> None:
    # Without priority, as on an engine of one's own: the bound alone.
    places = chats_of_gateway(SEQS, 1)
    chats = Chats(engine_url, places)
    async with chats.engines, talking(chats, 2 * FULL, LONG) as tasks:
        await sequences(engine_url, running=places // CHOICES * CHOICES)
        await vote(engine_url, with_chats=False)
        assert not any(task.done() for task in tasks)


async def test_a_judge_precedes_chats_in_the_engines_queue(engine_url: str) -> None:
    chats = Chats(engine_url, None)
    # A new grammar takes its time, in which a place that becomes free goes to others.
    await vote(engine_url, with_chats=True)
    async with chats.engines, talking(chats, FULL, LONG) as first, talking(chats, FULL, 300) as second:
        await sequences(engine_url, running=SEQS, waiting=SEQS)
        voted = asyncio.create_task(vote(engine_url, with_chats=True))
        await sequences(engine_url, running=SEQS, waiting=SEQS + 1)
        running = [task for task in first if not task.done()]
        running[0].cancel()
        await asyncio.wait([voted, *second], return_when=asyncio.FIRST_COMPLETED)
        assert voted.done()
        await voted
        assert not any(task.done() for task in second)
