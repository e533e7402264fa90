"""The schedule that starts the sweep, on a real Temporal server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleHandle,
    ScheduleIntervalSpec,
    ScheduleSpec,
    ScheduleState,
)

from clawloop.temporal.client import SWEEP_CATCH_UP, SWEEP_EVERY, begin_sweeping
from workflows import names

pytestmark = pytest.mark.slow


@pytest.fixture
async def sweep_schedule(client: Client) -> AsyncIterator[ScheduleHandle]:
    handle = client.get_schedule_handle(names.SWEEP_ID)
    yield handle
    await handle.delete()


async def test_a_server_that_was_off_catches_up_with_the_newest_sweep_only(
    client: Client, sweep_schedule: ScheduleHandle
) -> None:
    await begin_sweeping(client)
    schedule = (await sweep_schedule.describe()).schedule
    assert schedule.spec.intervals == [ScheduleIntervalSpec(every=SWEEP_EVERY)]
    assert schedule.policy.catchup_window == SWEEP_CATCH_UP == timedelta(minutes=2)


async def test_a_schedule_of_version_0_1_0_gets_the_window_and_stays_paused(
    client: Client, sweep_schedule: ScheduleHandle
) -> None:
    action = ScheduleActionStartWorkflow(names.SWEEP_WORKFLOW, id=names.SWEEP_ID, task_queue=names.WORKFLOW_QUEUE)
    spec = ScheduleSpec(intervals=[ScheduleIntervalSpec(every=SWEEP_EVERY)])
    older = Schedule(action=action, spec=spec, state=ScheduleState(paused=True, note="maintenance"))
    await client.create_schedule(names.SWEEP_ID, older)
    assert (await sweep_schedule.describe()).schedule.policy.catchup_window == timedelta(days=365)
    await begin_sweeping(client)
    schedule = (await sweep_schedule.describe()).schedule
    assert schedule.policy.catchup_window == SWEEP_CATCH_UP
    assert (schedule.state.paused, schedule.state.note) == (True, "maintenance")
