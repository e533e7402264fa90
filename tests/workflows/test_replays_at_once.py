"""A worker that takes over many workflows replays few of them at once; the SDK's core asks for its slots."""

from __future__ import annotations

import asyncio
import threading

import pytest
from temporalio.client import Client
from temporalio.worker import (
    FixedSizeSlotSupplier,
    SlotMarkUsedContext,
    SlotReleaseContext,
    Worker,
    WorkerTuner,
    WorkflowSlotInfo,
)

from clawloop.app.temporal.replay import POLLS, REPLAYS, ReplaySlots
from tests.workflows.conftest import Conversation, ScriptedActivities, end_all, until
from workflows import names
from workflows.session import SessionWorkflow

SESSIONS = 12
FEW = FixedSizeSlotSupplier(10)


class WatchedSlots(ReplaySlots):
    """Attributes: replays: at once, the most there were; news: tasks of workflows in memory."""

    def __init__(self) -> None:
        super().__init__(REPLAYS)
        self.replays = 0
        self.news = 0
        self._under_way: set[int] = set()
        self._lock = threading.Lock()

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        assert isinstance(ctx.slot_info, WorkflowSlotInfo)
        with self._lock:
            if ctx.slot_info.is_sticky:
                self.news += 1
            else:
                self._under_way.add(id(ctx.permit))
                self.replays = max(self.replays, len(self._under_way))
        super().mark_slot_used(ctx)

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        with self._lock:
            self._under_way.discard(id(ctx.permit))
        super().release_slot(ctx)


def worker(client: Client, slots: ReplaySlots) -> Worker:
    tuner = WorkerTuner.create_composite(
        workflow_supplier=slots, activity_supplier=FEW, local_activity_supplier=FEW, nexus_supplier=FEW
    )
    return Worker(
        client,
        task_queue=names.WORKFLOW_QUEUE,
        workflows=[SessionWorkflow],
        tuner=tuner,
        max_concurrent_workflow_task_polls=POLLS,
    )


@pytest.mark.long
@pytest.mark.timeout(2400)
async def test_a_worker_that_takes_over_replays_few_at_once_and_all_get_on(client: Client) -> None:
    scripted = ScriptedActivities()
    talks = [Conversation(client) for _ in range(SESSIONS)]

    async def say() -> None:
        said = set(await asyncio.gather(*(talk.say() for talk in talks)))
        await until(lambda: said <= {ask.turn_id for ask in scripted.judged}, seconds=200)

    async with Worker(client, task_queue=names.JUDGE_QUEUE, activities=[scripted.judge_turn, scripted.judge_turns]):
        try:
            first = WatchedSlots()
            async with worker(client, first):
                for _ in range(5):
                    await say()
            assert first.news >= SESSIONS
            second = WatchedSlots()
            async with worker(client, second):
                for _ in range(5):
                    await say()
            assert 1 <= second.replays <= 2 * REPLAYS + 1
            assert second.news >= SESSIONS
        finally:
            await end_all(client)
