"""The schedule that starts the sweep, on a real Temporal server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.client import Client, ScheduleHandle, ScheduleIntervalSpec

from clawloop.app.temporal.server import SWEEP_CATCH_UP, SWEEP_EVERY, begin_sweeping
from workflows import names


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


async def test_a_paused_schedule_stays_paused(client: Client, sweep_schedule: ScheduleHandle) -> None:
    await begin_sweeping(client)
    await sweep_schedule.pause(note="maintenance")
    await begin_sweeping(client)
    state = (await sweep_schedule.describe()).schedule.state
    assert (state.paused, state.note) == (True, "maintenance")
