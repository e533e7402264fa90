"""A worker of all workflows as the orchestrator has it, but for how many histories it replays at once.

It has no local activities: the sessions of the benchmark call none.

python -m benchmarks.long_histories_worker ADDRESS REPLAYS    0: the SDK's default, a hundred workflow tasks of any kind
"""

from __future__ import annotations

import asyncio
import signal
import sys

from temporalio.worker import Worker

from clawloop.processes.parent_death import end_with_parent
from clawloop.processes.workers import STICKY_SECONDS
from clawloop.temporal.plugin import connect
from clawloop.temporal.replay_slots import POLLS, replaying_few_at_once
from workflows import names
from workflows.registered import WORKFLOWS

SDK_POLLS = 5


async def main(address: str, replays: int) -> None:
    end_with_parent(signal.SIGKILL)
    worker = Worker(
        await connect(address),
        task_queue=names.WORKFLOW_QUEUE,
        workflows=WORKFLOWS,
        tuner=replaying_few_at_once(replays) if replays else None,
        max_concurrent_workflow_task_polls=POLLS if replays else SDK_POLLS,
        sticky_queue_schedule_to_start_timeout=STICKY_SECONDS,
    )
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
