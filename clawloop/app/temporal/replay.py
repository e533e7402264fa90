"""Replays histories: of open workflows on this version's code, and how many a worker replays at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

from temporalio.client import Client, WorkflowHistory
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    Replayer,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    WorkerTuner,
    WorkflowSlotInfo,
)

from clawloop.app.temporal.plugin import ClawloopPlugin
from clawloop.core.errors import SignalFailed
from workflows.registered import WORKFLOWS

# Slots ----------------------------------------------------------------------------------------------------------------
# Limits how many workflows a worker replays at once.
#
# After a worker's death another one replays the histories of all open workflows. Replays share one GIL: with the SDK's
# default, a hundred workflow tasks at once, each takes longer than a workflow task's 10 s, so that all of them time
# out and begin again.

# Replays at once of the task queue. With two, on two cores that are busy with other programs, each takes longer than a
# workflow task's 10 s (measured, benchmarks/results/README.md).
REPLAYS = 1
# Three polls: the SDK's ratio of 0.2 makes one of the shared queue, two of the sticky queue.
POLLS = 3
# The SDK's default, for workflow tasks of any kind, and for local activities.
_TASKS = 100
_ACTIVITIES = FixedSizeSlotSupplier(_TASKS)


def replaying_few_at_once(replays: int = REPLAYS) -> WorkerTuner:
    """A tuner for one worker."""
    return WorkerTuner.create_composite(
        workflow_supplier=ReplaySlots(replays),
        activity_supplier=_ACTIVITIES,
        local_activity_supplier=_ACTIVITIES,
        nexus_supplier=_ACTIVITIES,
    )


class _Permit(SlotPermit):
    """Attributes: counts_in: what it has a share of; None once its task is of a workflow in memory."""

    def __init__(self, counts_in: asyncio.Semaphore) -> None:
        self.counts_in: asyncio.Semaphore | None = counts_in


class ReplaySlots(CustomSlotSupplier):
    """Slots of workflow tasks, a few of them for polls and replays.

    A poll of the task queue brings a workflow with its whole history: a new one, or one whose worker is gone. At most
    `replays` of these polls and tasks are under way. A poll of the worker's own (sticky) queue brings news of a
    workflow that the worker has in memory. At times it brings a whole history, too (measured with Temporal 1.32); one
    more of these polls and of such tasks are under way, so that news get past a replay. News alone is limited by the
    SDK's default.

    A task with a history counts until its workflow has nothing more to do: further tasks that Temporal hands out with
    the answer to it count, too. Not counted are histories of workflows that the worker dropped from memory, of more
    than a thousand open ones.

    Each worker needs one of its own: a permit that is granted while the SDK's core shuts down is never given back.
    """

    def __init__(self, replays: int) -> None:
        # By whether the poll is of the worker's own (sticky) queue.
        self._polls_and_replays = {False: asyncio.Semaphore(replays), True: asyncio.Semaphore(replays + 1)}
        self._tasks = asyncio.Semaphore(_TASKS)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        self._loop = asyncio.get_running_loop()
        counts_in = self._polls_and_replays[ctx.is_sticky]
        await counts_in.acquire()
        try:
            await self._tasks.acquire()
        except asyncio.CancelledError:  # the core gave the poll up
            counts_in.release()
            raise
        return _Permit(counts_in)

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        """Return no slot: it would serve workflows that this process starts and runs at once, and it starts none."""
        return None

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        if isinstance(ctx.slot_info, WorkflowSlotInfo) and ctx.slot_info.is_sticky:
            self._soon(lambda: self._let_go(cast(_Permit, ctx.permit)))

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        def release() -> None:
            self._let_go(cast(_Permit, ctx.permit))
            self._tasks.release()

        self._soon(release)

    def _soon(self, change: Callable[[], None]) -> None:
        """Called by threads of the SDK's core, in order for one permit."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(change)

    @staticmethod
    def _let_go(permit: _Permit) -> None:
        if permit.counts_in is not None:
            permit.counts_in.release()
            permit.counts_in = None


# Open workflows -------------------------------------------------------------------------------------------------------
# Replays the histories of open workflows on this version's code: whether workers of this version can continue them.

# The SDK prints a whole protocol message around it.
_MESSAGE = re.compile(r'message: "(.+?)", source: ')


@dataclass(frozen=True, slots=True)
class Replay:
    """
    Args:
        problem: why this code cannot continue the workflow; None if it can.
    """

    workflow_id: str
    workflow_type: str
    events: int
    problem: str | None


async def replay_open_workflows(client: Client) -> AsyncIterator[Replay]:
    """Replay each running workflow; only reads.

    Raises:
        SignalFailed: Temporal does not answer.
    """
    try:
        async for execution in client.list_workflows("ExecutionStatus = 'Running'"):
            handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
            try:
                history = await handle.fetch_history()
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    continue  # it was deleted meanwhile
                raise
            problem = await replay(history)
            yield Replay(execution.id, execution.workflow_type, len(history.events), problem)
    except (RPCError, RuntimeError) as error:
        raise SignalFailed(f"Temporal: {' '.join(str(error).split())}") from error


async def replay(history: WorkflowHistory) -> str | None:
    """The reason for which this code cannot continue the workflow of this history; None if it can."""
    replayer = Replayer(workflows=WORKFLOWS, plugins=[ClawloopPlugin(sandboxed=True)])
    result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
    if result.replay_failure is None:
        return None
    text = " ".join(str(result.replay_failure).split())
    quoted = _MESSAGE.search(text)
    return text if quoted is None else quoted[1]
