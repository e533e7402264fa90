"""A disk that is full for a day: the step is retried each minute, and committed afterwards from the same batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from clawloop.temporal.client import ClawloopPlugin
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, training
from workflows import names
from workflows.training import TrainingWorkflow


@pytest.mark.slow
@pytest.mark.long
async def test_a_step_that_finds_no_disk_for_a_day_is_committed_afterwards() -> None:
    scripted = ScriptedLearning()
    full = [ApplicationError("version 1 cannot be written: No space left on device", type="TrainerUnavailable")]
    scripted.fails = lambda n: full[0] if full else None
    program = Path(sys.executable).with_name("temporal-test-server")
    async with await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(program), plugins=[ClawloopPlugin()]
    ) as environment:
        client = environment.client
        kinds = {key.name: IndexedValueType.ValueType(key.indexed_value_type) for key in names.SEARCH_ATTRIBUTES}
        await client.operator_service.add_search_attributes(AddSearchAttributesRequest(search_attributes=kinds))
        learner = Learner(client, scripted)
        ledger: list[Callable[..., Any]] = [
            scripted.look,
            scripted.claim,
            scripted.quarantine,
            scripted.abandon,
            scripted.publish,
        ]
        async with (
            Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[TrainingWorkflow]),
            Worker(client, task_queue=names.LEDGER_QUEUE, activities=ledger),
            training(client, scripted),
        ):
            await learner.samples(scripted.needed)
            await until(lambda: "train 1" in scripted.happened)
            before = await events(learner)
            for _ in range(24):  # a call of the server may take 30 s
                await environment.sleep(timedelta(hours=1))
            assert await events(learner) <= before + 3
            assert scripted.happened.count("train 1") > 1000
            full.clear()
            await environment.sleep(timedelta(minutes=2))
            await until(lambda: scripted.version == 1)
            await learner.handle.terminate("the test is over")
    assert scripted.happened.count("claim 1: 16") == 1


async def events(learner: Learner) -> int:
    return len((await learner.handle.fetch_history()).events)
