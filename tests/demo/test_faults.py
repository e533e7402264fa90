"""The demo's fault injector on parts that only count, and the supervisor's kill on a real child."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from clawloop.app.demo.faults import FaultInjector
from clawloop.app.local.supervision.supervisor import PartState
from tests.local.test_supervisor import SLEEPS, part, supervising

NAMES = ("postgres", "temporal", "vllm", "gateway-1", "gateway-2", "trainer")


class CountingParts:
    """Parts that are back at once; ends the injection after some faults."""

    def __init__(self, limit: int) -> None:
        self.killed: list[str] = []
        self.waited: list[str] = []
        self.missed = 0
        self.done = asyncio.Event()
        self._limit = limit

    @property
    def names(self) -> Sequence[str]:
        return NAMES

    def kill(self, name: str) -> bool:
        if name == "trainer" and self.missed == 0:
            self.missed += 1
            return False
        self.killed.append(name)
        return True

    async def ready_again(self, name: str) -> None:
        self.waited.append(name)
        if len(self.killed) >= self._limit:
            self.done.set()
            await asyncio.Event().wait()


async def no_pause(seconds: float) -> None:
    assert seconds > 0
    await asyncio.sleep(0)


async def test_every_part_is_killed_and_the_engine_seldom() -> None:
    parts, lines = CountingParts(24), list[str]()
    injector = FaultInjector(parts, lines.append, 1, no_pause)
    async with injector.injecting():
        await asyncio.wait_for(parts.done.wait(), 30)
    assert parts.killed == parts.waited
    assert [number for number, name in enumerate(parts.killed, 1) if name == "vllm"] == [8, 16, 24]
    assert set(parts.killed) == set(NAMES)
    assert injector.counts == {name: parts.killed.count(name) for name in set(parts.killed)}
    assert injector.counts.total() == 24
    assert lines[0] == f"fault 1: kill -9 of {parts.killed[0]}"
    assert lines[1].startswith(f"fault 1: {parts.killed[0]} is back after ")
    assert len(lines) == 2 * 24 - 1


@pytest.mark.slow
async def test_a_killed_part_is_ready_again_once_it_was_restarted(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, statuses):
        supervisor.start(part("worker", SLEEPS, stop_within=timedelta(seconds=3)))
        assert not supervisor.kill("worker")  # nothing runs yet
        await supervisor.ready("worker")
        async with asyncio.timeout(30):
            while not supervisor.kill("worker"):
                await asyncio.sleep(0.02)
            await supervisor.ready_again("worker")
        assert supervisor.names == ["worker"]
        waiting = [status.detail for status in statuses.history if status.state is PartState.WAITING]
        assert waiting == ["was ended by SIGKILL; restart in 0.05 s"]
