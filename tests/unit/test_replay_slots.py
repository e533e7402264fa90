"""Which workflow tasks hold one of the few slots: polls, and tasks that begin with a history."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest
from temporalio.worker import SlotMarkUsedContext, SlotPermit, SlotReleaseContext, SlotReserveContext

from clawloop.temporal.replay_slots import ReplaySlots


@dataclass
class Task:
    """What the SDK's core says of a workflow task."""

    is_sticky: bool
    workflow_type: str = "Session"


@dataclass
class Used:
    slot_info: Task
    permit: SlotPermit


POLL = cast(SlotReserveContext, None)


def begin(slots: ReplaySlots, permit: SlotPermit, *, in_memory: bool) -> None:
    slots.mark_slot_used(cast(SlotMarkUsedContext, Used(Task(in_memory), permit)))


async def is_full(slots: ReplaySlots) -> bool:
    try:
        async with asyncio.timeout(0.02):
            permit = await slots.reserve_slot(POLL)
    except TimeoutError:
        return True
    slots.release_slot(SlotReleaseContext(None, permit))
    await asyncio.sleep(0)
    return False


@pytest.fixture
async def slots() -> ReplaySlots:
    return ReplaySlots(2)


async def test_no_more_histories_are_replayed_at_once_than_there_are_slots(slots: ReplaySlots) -> None:
    replays = [await slots.reserve_slot(POLL) for _ in range(2)]
    for permit in replays:
        begin(slots, permit, in_memory=False)
    assert await is_full(slots)
    slots.release_slot(SlotReleaseContext(None, replays[0]))
    await asyncio.sleep(0)
    assert not await is_full(slots)


async def test_tasks_of_workflows_in_memory_hold_no_slot(slots: ReplaySlots) -> None:
    """Also while a local activity keeps their task open, as where PostgreSQL hangs."""
    for _ in range(50):
        begin(slots, await slots.reserve_slot(POLL), in_memory=True)
        await asyncio.sleep(0)
    assert not await is_full(slots)


async def test_a_slot_is_given_back_once(slots: ReplaySlots) -> None:
    for in_memory in (True, False):
        permit = await slots.reserve_slot(POLL)
        begin(slots, permit, in_memory=in_memory)
        slots.release_slot(SlotReleaseContext(None, permit))
        await asyncio.sleep(0)
    held = [await slots.reserve_slot(POLL) for _ in range(2)]
    assert await is_full(slots)
    del held


async def test_a_poll_that_is_given_up_while_it_waits_takes_nothing(slots: ReplaySlots) -> None:
    held = [await slots.reserve_slot(POLL) for _ in range(2)]
    assert await is_full(slots)
    for permit in held:
        slots.release_slot(SlotReleaseContext(None, permit))
    await asyncio.sleep(0)
    again = [await slots.reserve_slot(POLL) for _ in range(2)]
    assert len(again) == 2
    assert await is_full(slots)


async def test_permits_of_a_worker_that_outlives_its_event_loop_are_let_go_quietly() -> None:
    loop = asyncio.new_event_loop()
    slots = ReplaySlots(1)
    permit = await asyncio.to_thread(loop.run_until_complete, slots.reserve_slot(POLL))
    loop.close()
    slots.release_slot(SlotReleaseContext(None, permit))
