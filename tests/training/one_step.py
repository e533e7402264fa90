"""A workflow for tests that runs one step and retries without a limit."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.training.train_step import StepDone, TrainingActivities, TrainStep

QUEUE = "one-step"


@workflow.defn(name="OneStep")
class OneStep:
    @workflow.run
    async def run(self, ask: TrainStep, queue: str, heartbeat_seconds: float) -> StepDone:
        return await workflow.execute_activity_method(
            TrainingActivities.train_step,
            ask,
            task_queue=queue,
            start_to_close_timeout=timedelta(minutes=2),
            heartbeat_timeout=timedelta(seconds=heartbeat_seconds),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100), backoff_coefficient=1.0),
        )


def workflow_worker(client: Client) -> Worker:
    return Worker(client, task_queue=QUEUE, workflows=[OneStep], workflow_runner=UnsandboxedWorkflowRunner())
