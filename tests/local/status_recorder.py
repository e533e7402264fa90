"""Records the statuses that a supervisor reports, for tests to inspect and wait for."""

from __future__ import annotations

import asyncio

from clawloop.app.local.supervision.supervisor import PartState, PartStatus


class StatusRecorder:
    """Pass it to a Supervisor as `changed`."""

    def __init__(self) -> None:
        self.history: list[PartStatus] = []

    def __call__(self, status: PartStatus) -> None:
        self.history.append(status)

    def states(self, name: str) -> list[PartState]:
        return [status.state for status in self.history if status.name == name]

    async def until(self, name: str, state: PartState, times: int = 1) -> PartStatus:
        """Wait until a part has entered the state that many times; returns the status of the last of them."""
        async with asyncio.timeout(120):
            while self.states(name).count(state) < times:
                await asyncio.sleep(0.02)
        return [status for status in self.history if status.name == name and status.state is state][times - 1]
