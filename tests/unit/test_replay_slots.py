"""Which workflow tasks count as replays, and which polls wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
from temporalio.worker import SlotMarkUsedContext, SlotPermit, SlotReleaseContext, SlotReserveContext

from clawloop.app.temporal.replay import ReplaySlots


@dataclass
class Poll:
    """What the SDK's core says of a poll."""

    is_sticky: bool


@dataclass
class Task:
    """What the SDK's core says of a workflow task."""

    is_sticky: bool
    workflow_type: str = "Session"


@dataclass
class Used:
    slot_info: Task
    permit: SlotPermit


class Worker:
    """Asks for slots as the SDK's core does; every call has ended when its method returns."""

    def __init__(self, replays: int) -> None:
        self.slots = ReplaySlots(replays)

    async def poll(self, *, own_queue: bool = False) -> SlotPermit | None:
        """None: no slot is free."""
        asking = asyncio.create_task(self.slots.reserve_slot(cast(SlotReserveContext, Poll(own_queue))))
        await self._settle()
        if asking.done():
            return asking.result()
        asking.cancel()
        await self._settle()
        return None

    async def begin(self, permit: SlotPermit, *, with_history: bool) -> None:
        self.slots.mark_slot_used(cast(SlotMarkUsedContext, Used(Task(is_sticky=not with_history), permit)))
        await self._settle()

    async def end(self, permit: SlotPermit) -> None:
        self.slots.release_slot(SlotReleaseContext(None, permit))
        await self._settle()

    async def replay(self, *, own_queue: bool = False) -> SlotPermit:
        permit = await self.poll(own_queue=own_queue)
        assert permit is not None
        await self.begin(permit, with_history=True)
        return permit

    async def news(self) -> SlotPermit:
        """Take a task of a workflow in memory."""
        permit = await self.poll(own_queue=True)
        assert permit is not None
        await self.begin(permit, with_history=False)
        return permit

    @staticmethod
    async def _settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def worker() -> Worker:
    return Worker(2)


async def test_no_more_histories_are_replayed_at_once(worker: Worker) -> None:
    first, _ = await worker.replay(), await worker.replay()
    assert await worker.poll() is None
    await worker.end(first)
    assert await worker.poll() is not None
    assert await worker.poll() is None


async def test_replays_do_not_hold_up_workflows_in_memory(worker: Worker) -> None:
    for _ in range(2):
        await worker.replay()
    assert await worker.poll(own_queue=True) is not None


async def test_a_hundred_tasks_of_workflows_in_memory_run_at_once(worker: Worker) -> None:
    """Also while local activities keep them open, as where PostgreSQL hangs. Polls that are given up take nothing."""
    held = [await worker.news() for _ in range(100)]
    for _ in range(3):
        assert await worker.poll(own_queue=True) is None
        assert await worker.poll() is None
    await worker.end(held[0])
    await worker.end(held[1])
    assert await worker.poll() is not None
    assert await worker.poll(own_queue=True) is not None


async def test_histories_that_the_workers_own_queue_brings_hold_up_its_further_polls(worker: Worker) -> None:
    replays = [await worker.replay(own_queue=True) for _ in range(3)]
    assert await worker.poll(own_queue=True) is None
    assert await worker.poll() is not None
    await worker.end(replays[0])
    assert await worker.poll(own_queue=True) is not None


async def test_a_poll_that_finds_a_workflow_in_memory_leaves_its_replay_to_others(worker: Worker) -> None:
    for _ in range(3):
        permit = await worker.poll()
        assert permit is not None
        await worker.begin(permit, with_history=False)
    await worker.replay()
    await worker.replay()
    assert await worker.poll() is None


async def test_a_poll_that_ends_without_a_task_is_given_back_once(worker: Worker) -> None:
    for _ in range(5):
        permit = await worker.poll()
        assert permit is not None
        await worker.end(permit)
    await worker.replay()
    await worker.replay()
    assert await worker.poll() is None


async def test_a_poll_that_is_given_up_while_it_waits_takes_nothing(worker: Worker) -> None:
    for _ in range(200):
        held = [await worker.replay(), await worker.replay()]
        assert await worker.poll() is None
        for permit in held:
            await worker.end(permit)
    assert len([await worker.replay() for _ in range(2)]) == 2


@pytest.fixture
def closed_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


async def test_what_ends_after_its_event_loop_is_ignored(closed_loop: asyncio.AbstractEventLoop) -> None:
    """The core's threads may end later than the worker, and log whatever a supplier raises."""
    slots = ReplaySlots(1)
    reserving = slots.reserve_slot(cast(SlotReserveContext, Poll(is_sticky=False)))
    permit = await asyncio.to_thread(closed_loop.run_until_complete, reserving)
    closed_loop.close()
    slots.release_slot(SlotReleaseContext(None, permit))
