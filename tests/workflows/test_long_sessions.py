"""Sessions longer than one history: they continue as new with all unhandled messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest
from temporalio.client import Client

from clawloop.app.temporal.plugin import PAYLOAD_WARN_BYTES
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import FeedbackGiven
from clawloop.core.ids import TurnId, new_feedback_id, new_turn_id
from tests.workflows.conftest import Conversation, ScriptedActivities, until
from workflows.state import INBOX_LIMIT


@pytest.mark.parametrize(
    ("count", "roll_over_events"),
    # Of few events, since turns that wait are judged together; the long one rolls over when the server suggests it.
    [
        (600, 300),
        pytest.param(5_000, None, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
    ids=["600", "5000"],
)
async def test_a_session_of_thousands_of_turns_has_each_judged_once_over_several_runs(
    client: Client, scripted: ScriptedActivities, count: int, roll_over_events: int | None
) -> None:
    talk = Conversation(client)
    await talk.begin(roll_over_events=roll_over_events)
    turns = [new_turn_id() for _ in range(count)]
    waiting = iter(enumerate(turns))

    async def send() -> None:
        for number, turn in waiting:
            # A person never is this much ahead of the judge; 200 messages survive a roll-over.
            while number - len(scripted.judged) > 100:
                await asyncio.sleep(0.02)
            await talk.say(turn_id=turn)

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(send())
    await talk.say(ends=True)
    async with asyncio.timeout(120):
        summary = await talk.handle.result()
    counted = Counter(ask.turn_id for ask in scripted.judged)
    assert set(turns) <= set(counted)
    assert set(counted.values()) == {1}
    assert summary.guarantee == "has a sample"
    runs, events, largest = await histories(client, talk)
    assert runs > 1
    assert events <= 12 * count
    assert largest < PAYLOAD_WARN_BYTES
    print(f"\n{count} turns: {runs} runs, {events / count:.1f} events a turn, largest event {largest} bytes")  # noqa: T201


async def histories(client: Client, talk: Conversation) -> tuple[int, int, int]:
    """How many runs there were, their events in all, and the largest event in bytes."""
    runs = events = largest = 0
    described = await talk.handle.describe()
    run_id: str | None = described.raw_description.workflow_execution_info.first_run_id
    while run_id:
        handle = client.get_workflow_handle(described.id, run_id=run_id)
        history = await handle.fetch_history()
        runs += 1
        events += len(history.events)
        largest = max(largest, *(event.ByteSize() for event in history.events))
        ended = history.events[-1].workflow_execution_continued_as_new_event_attributes
        run_id = ended.new_execution_run_id or None
    return runs, events, largest


async def test_no_message_is_lost_in_a_roll_over(client: Client, scripted: ScriptedActivities) -> None:
    talk = Conversation(client)
    await talk.begin(roll_over_events=20)
    scripted.seconds = 0.01
    turns: list[TurnId] = []

    def all_judged() -> bool:
        return set(turns) <= {ask.turn_id for ask in scripted.judged}

    for _ in range(3):  # turns that come together are judged together: each round is more events than one history takes
        turns.extend([await talk.say() for _ in range(25)])
        await until(all_judged)
    await talk.say(ends=True)
    async with asyncio.timeout(60):
        await talk.handle.result()
    assert (await histories(client, talk))[0] >= 3


@pytest.mark.timeout(600)
async def test_no_turn_is_left_to_the_closing_while_its_judge_is_away(
    client: Client, scripted: ScriptedActivities
) -> None:
    """A new run takes over 200 messages, so the history grows until the judge has left as few."""
    talk = Conversation(client)
    await talk.begin(roll_over_events=200)
    scripted.gate.clear()
    # From its 200th event on it waits for its judge to end, to roll over; the other turns come meanwhile.
    turns = [await talk.say() for _ in range(60)]
    turns.extend(await asyncio.gather(*(talk.say() for _ in range(INBOX_LIMIT))))
    scripted.gate.set()
    await until(lambda: set(turns) <= {ask.turn_id for ask in scripted.judged}, seconds=200)
    assert set(Counter(ask.turn_id for ask in scripted.judged).values()) == {1}
    assert (await histories(client, talk))[0] > 1


@pytest.mark.timeout(600)
async def test_the_longest_history_ends_with_the_newest_turns_and_all_feedback(
    client: Client, scripted: ScriptedActivities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day without a judge must not make a history that no worker replays in time."""
    monkeypatch.setattr("workflows.session.ROLL_OVER_WAIT", timedelta(seconds=1))
    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(roll_over_events=50)
    for _ in range(4):
        await talk.say()
    await until(lambda: len(scripted.judged) == 4)
    feedback = FeedbackGiven(new_feedback_id(), new_turn_id())
    await talk.notifier.notify(SessionNotice(talk.facts, feedback))
    await asyncio.gather(*(talk.say() for _ in range(INBOX_LIMIT)))
    newest = [await talk.say() for _ in range(20)]
    async with asyncio.timeout(200):
        while (await histories(client, talk))[0] < 2:
            await asyncio.sleep(0.2)
    scripted.gate.set()
    wanted = {*newest, feedback.turn_id}
    await until(lambda: wanted <= {ask.turn_id for ask in scripted.judged}, seconds=200)
    assert feedback.feedback_id in {ask.feedback_id for ask in scripted.judged}
