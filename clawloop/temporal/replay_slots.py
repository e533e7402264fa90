"""Limits how many workflows a worker replays at once.

After a worker's death another one replays the histories of all open workflows. Replays share one GIL: with the SDK's
default, a hundred workflow tasks at once, each takes longer than a workflow task's 10 s, so that all of them time out
and begin again.
"""

from __future__ import annotations

import asyncio
from typing import cast

from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    WorkerTuner,
    WorkflowSlotInfo,
)

# Polls that wait and replays, together: two histories are replayed while a poll of either kind waits.
# `benchmarks/long_histories.py` compares it with the SDK's default.
SLOTS = 4
# Of them one waits for what any worker may take, two for tasks of the workflows in memory.
POLLS = 3
# The SDK's default, for activities; the worker of the workflows has local ones alone.
_ACTIVITIES = FixedSizeSlotSupplier(100)


def replaying_few_at_once(slots: int = SLOTS) -> WorkerTuner:
    """A tuner whose worker has at most so many polls and replays; tasks of workflows in memory are not limited."""
    return WorkerTuner.create_composite(
        workflow_supplier=ReplaySlots(slots),
        activity_supplier=_ACTIVITIES,
        local_activity_supplier=_ACTIVITIES,
        nexus_supplier=_ACTIVITIES,
    )


class _Permit(SlotPermit):
    """Attributes: is_held: it counts as a poll, or as a replay."""

    is_held = True


class ReplaySlots(CustomSlotSupplier):
    """Slots of workflow tasks: a number of them for polls and replays.

    What a poll brings is known only then: a task of a workflow in memory leaves its slot to others at once. Whatever
    else comes begins with the whole history, of a new workflow or of one whose worker is gone.
    """

    def __init__(self, slots: int) -> None:
        self._free = asyncio.Semaphore(slots)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        self._loop = asyncio.get_running_loop()
        await self._free.acquire()
        return _Permit()

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        """For workflows that this process starts itself and runs at once: none are."""
        return None

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        if isinstance(ctx.slot_info, WorkflowSlotInfo) and ctx.slot_info.is_sticky:
            self._let_go(ctx.permit)

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        self._let_go(ctx.permit)

    def _let_go(self, permit: SlotPermit) -> None:
        """Called by threads of the SDK's core, one after the other for one permit."""
        held = cast(_Permit, permit)
        if held.is_held and self._loop is not None and not self._loop.is_closed():
            held.is_held = False
            self._loop.call_soon_threadsafe(self._free.release)
