"""What a supervisor said, for tests to look at and wait for."""

from __future__ import annotations

import asyncio

from clawloop.local.supervision.part import PartState, PartStatus


class Told:
    """Hand it to a Supervisor as `changed`."""

    def __init__(self) -> None:
        self.statuses: list[PartStatus] = []

    def __call__(self, status: PartStatus) -> None:
        self.statuses.append(status)

    def states(self, name: str) -> list[PartState]:
        return [status.state for status in self.statuses if status.name == name]

    async def until(self, name: str, state: PartState, times: int = 1) -> PartStatus:
        """The status in which a part was in that state for the n-th time; waits for it."""
        async with asyncio.timeout(30):
            while self.states(name).count(state) < times:
                await asyncio.sleep(0.02)
        return [status for status in self.statuses if status.name == name and status.state is state][times - 1]
