"""A judge that shares a real engine with chats is answered while they fill it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from clawloop.app.layout.memory import chats_of_gateway
from clawloop.serving.endpoints import JUDGE_BEHIND
from tests.e2e.shared_engine import SEQS, Chats, sequences, vote

CHOICES = 8
FULL = SEQS // CHOICES
"""Chats that fill the engine."""
LONG = 4000
"""Tokens of a reply that does not end before the test cancels it."""


@asynccontextmanager
async def talking(chats: Chats, count: int, tokens: int, later: int = 0) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many chats; what is left of them at the end is cancelled, which aborts their sequences."""
    tasks = [asyncio.create_task(chats.chat(key, tokens, CHOICES, stream=False, later=later)) for key in range(count)]
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


@pytest.mark.parametrize("later", [0, 2 * JUDGE_BEHIND])
async def test_chats_precede_a_judge_but_not_one_that_has_waited(later: int, engine_url: str) -> None:
    chats = Chats(engine_url, None)
    # A new grammar takes its time, in which a place that becomes free goes to others.
    await vote(engine_url, with_chats=True)
    async with chats.engines, talking(chats, FULL, LONG) as first:
        await sequences(engine_url, running=SEQS)
        voted = asyncio.create_task(vote(engine_url, with_chats=True))
        await sequences(engine_url, running=SEQS, waiting=1)
        async with talking(chats, FULL, 300, later) as second:
            await sequences(engine_url, running=SEQS, waiting=SEQS + 1)
            running = [task for task in first if not task.done()]
            running[0].cancel()
            await asyncio.wait([voted, *second], return_when=asyncio.FIRST_COMPLETED)
            assert voted.done() is (later > 0)
            assert any(task.done() for task in second) is (later == 0)
        await voted
