"""A worker of all workflows as the orchestrator has it, but for its slots of workflow tasks.

python -m benchmarks.long_histories_worker ADDRESS SLOTS    0: the SDK's default, a hundred for tasks of any kind
"""

from __future__ import annotations

import asyncio
import sys

from temporalio.worker import Worker

from clawloop.processes.workers import STICKY_SECONDS
from clawloop.temporal.plugin import connect
from clawloop.temporal.replay_slots import POLLS, replaying_few_at_once
from workflows import names
from workflows.registered import WORKFLOWS

SDK_POLLS = 5


async def main(address: str, slots: int) -> None:
    worker = Worker(
        await connect(address),
        task_queue=names.WORKFLOW_QUEUE,
        workflows=WORKFLOWS,
        tuner=replaying_few_at_once(slots) if slots else None,
        max_concurrent_workflow_task_polls=POLLS if slots else SDK_POLLS,
        sticky_queue_schedule_to_start_timeout=STICKY_SECONDS,
    )
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
