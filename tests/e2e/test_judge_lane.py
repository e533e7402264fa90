"""A judge that shares a real engine with chats is answered while they fill it."""

from __future__ import annotations

import asyncio

from clawloop.layout.engine import chats_of_gateway
from tests.e2e.shared_engine import SEQS, Chats, vote

CHOICES = 8


async def test_chats_leave_sequences_for_the_judge(engine_url: str) -> None:
    # Without priority, as on an engine of one's own: the bound alone.
    chats = Chats(engine_url, chats_of_gateway(SEQS, 1))
    async with chats.engines:
        running = [asyncio.create_task(chats.chat(key, 300, CHOICES)) for key in range(2 * SEQS // CHOICES)]
        await chats.begun(first := (SEQS - SEQS // 8) // CHOICES)
        voted = await vote(engine_url, with_chats=False)
        await asyncio.gather(*running)
    # Before any chat of the second wave; without the bound the engine would have that wave in front of the judge.
    assert voted < sorted(chats.ended)[first]


async def test_a_judge_precedes_chats_in_the_engines_queue(engine_url: str) -> None:
    chats = Chats(engine_url, None)
    async with chats.engines:
        first = [asyncio.create_task(chats.chat(key, 100, CHOICES)) for key in range(SEQS // CHOICES)]
        await chats.begun(len(first))
        queued = [asyncio.create_task(chats.chat(key, 400, CHOICES)) for key in range(SEQS // CHOICES)]
        await asyncio.sleep(0.5)  # until the engine has them
        voted = await vote(engine_url, with_chats=True)
        await asyncio.gather(*first, *queued)
    assert voted < sorted(chats.ended)[len(first)]
