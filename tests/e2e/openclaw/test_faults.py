"""People talk with the real OpenClaw while versions are published, gateways die and the engine restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.e2e.adapters import random_versions
from tests.e2e.openclaw.configurations import configuration
from tests.e2e.openclaw.recorded import Session, by_conversation, read_back
from tests.e2e.openclaw.resident import OpenClaw, running_openclaw
from tests.e2e.openclaw.script import TOOL
from tests.e2e.openclaw.stack import ENGINE, GATEWAYS, Stack
from tests.e2e.publishing import publish_all

PEOPLE = 6
# Longer than a turn with all of OpenClaw's retries.
PATIENCE_SECONDS = 600


@dataclass
class People:
    """
    Attributes:
        answered: how many messages of each were answered.
    """

    client: OpenClaw
    answered: dict[str, int] = field(default_factory=dict)
    stop: bool = False

    async def talk(self, name: str) -> None:
        while not self.stop:
            number = self.answered.get(name, 0) + 1
            mark = f"ask-{name}-{number}"
            text = f"This is {mark}{f', {TOOL}' if number % 2 == 0 else ''}."
            assert await self.client.say(text, name) == f"The answer to {mark}."
            self.answered[name] = number

    def are_recorded(self, sessions: Sequence[Session]) -> bool:
        """Every answer is that of a complete main turn of the session that its conversation has."""
        complete = [turn for session in sessions for turn in session.main if turn.view["status"] == "complete"]
        recorded = {str((turn.reply or {}).get("content")) for turn in complete}
        answers = {f"The answer to ask-{name}-{n + 1}." for name, count in self.answered.items() for n in range(count)}
        return recorded >= answers

    async def more(self, count: int) -> None:
        """Wait until so many more messages were answered."""
        goal = sum(self.answered.values()) + count
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(self.answered.values()) < goal:
                await asyncio.sleep(0.05)


async def test_no_turn_fails(stack: Stack, tiny_model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "openclaw"
    versions = random_versions(tiny_model_path, stack.data / "adapters", [1, 2])
    made = partial(configuration, "ours", folder=folder, gateway=stack.url, key=stack.key)
    async with running_openclaw(folder, made) as client:
        people = People(client)
        async with asyncio.TaskGroup() as group:
            for number in range(PEOPLE):
                group.create_task(people.talk(f"f{number}"))
            await people.more(PEOPLE)
            for version, gateway in zip(versions, GATEWAYS, strict=True):
                publishing = group.create_task(publish_all(stack.database_url, stack.temporal, [version]))
                assert stack.supervisor.kill(gateway)
                await publishing
                await people.more(PEOPLE)
                assert stack.supervisor.kill(ENGINE)
                await people.more(PEOPLE)
                await stack.supervisor.ready_again(ENGINE)
            people.stop = True
        sessions = await read_back(stack, people.are_recorded)
    assert by_conversation(sessions).keys() == people.answered.keys()
    served = {turn.view["version"] for session in sessions for turn in session.main}
    assert served == {0, 1, 2}
    print(f"{sum(people.answered.values())} messages answered")  # noqa: T201
