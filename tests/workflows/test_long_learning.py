"""Training longer than one history: it continues as new between steps, and each batch is trained once."""

from __future__ import annotations

import asyncio

from temporalio.client import Client

from clawloop.app.temporal.plugin import PAYLOAD_WARN_BYTES
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning

STEPS = 50
RUN_EVENTS = 125


async def test_many_steps_take_several_runs_of_bounded_size(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.needed = 1
    async with learning(client, scripted):
        learner = Learner(client, scripted)
        await learner.begin(roll_over_events=RUN_EVENTS)
        await learner.samples(STEPS)
        async with asyncio.timeout(120):
            await until(lambda: scripted.version == STEPS, seconds=110)
        details = await learner.shows(f"v{STEPS} answers, the newest")
        sizes, largest = await histories(client, learner)
    assert [line for line in scripted.happened if line.startswith("train")] == [
        f"train {n}" for n in range(1, STEPS + 1)
    ]
    assert details.count("committed") == 20
    assert len(sizes) > 5
    # A run ends after the step during which it reached its limit.
    assert max(sizes) < RUN_EVENTS + 60
    assert largest < PAYLOAD_WARN_BYTES
    print(f"\n{STEPS} steps: {len(sizes)} runs, {sum(sizes) / STEPS:.1f} events a step, largest {largest} bytes")  # noqa: T201


async def histories(client: Client, learner: Learner) -> tuple[list[int], int]:
    """The number of events of each run, and the largest event in bytes."""
    sizes: list[int] = []
    largest = 0
    described = await learner.handle.describe()
    run_id: str | None = described.raw_description.workflow_execution_info.first_run_id
    while run_id:
        history = await client.get_workflow_handle(described.id, run_id=run_id).fetch_history()
        sizes.append(len(history.events))
        largest = max(largest, *(event.ByteSize() for event in history.events))
        run_id = history.events[-1].workflow_execution_continued_as_new_event_attributes.new_execution_run_id or None
    return sizes, largest


async def test_changes_around_a_roll_over_hold(client: Client) -> None:
    scripted = ScriptedLearning()
    async with learning(client, scripted):
        learner = Learner(client, scripted)
        await learner.begin(roll_over_events=20)
        for _ in range(4):
            await learner.samples(16)
        await until(lambda: scripted.version == 4)
        await learner.pause("enough")
        await learner.samples(16)
        await learner.shows("paused: enough")
        await learner.resume()
        await until(lambda: scripted.version == 5)
