"""1,000 schedules by seed: interleavings, crashes between any two calls, lost and doubled deliveries; all on fakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from tests.simulation.schedule import Schedule, VirtualTimeLoop
from tests.simulation.system import System

Result = TypeVar("Result")

SCHEDULES, GROUPS = 1000, 10


def simulate(seed: int) -> tuple[Schedule, System, list[str]]:
    async def run() -> tuple[Schedule, System, list[str]]:
        schedule = Schedule(seed, crashes=0.03, timeouts=0.1)
        system = System(schedule)
        system.start(sessions=2, turns=4)
        await schedule.run()
        return schedule, system, await system.problems()

    return run_virtually(run())


def run_virtually(work: Coroutine[object, object, Result]) -> Result:
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):  # of a schedule that failed
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What is logged is expected, and formatting it would take half of the time."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("group", range(GROUPS))
def test_nothing_is_lost_or_done_twice_whatever_is_killed_when(group: int) -> None:
    killed = doubled = trained = 0
    for seed in range(group * SCHEDULES // GROUPS, (group + 1) * SCHEDULES // GROUPS):
        schedule, system, problems = simulate(seed)
        assert problems == [], f"seed {seed}"
        killed, doubled = killed + schedule.killed, doubled + schedule.doubled
        trained += len(system.ledger.steps)
    # The schedules do what they are for.
    assert min(killed, doubled, trained) >= SCHEDULES // GROUPS
