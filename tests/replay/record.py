"""Records the histories that test_replay.py replays: `python -m tests.replay.record [PATH ...]`.

Each is one path through a workflow, run on Temporal's development server with scripted activities. Record anew only
where a path is new: an old history is what open sessions hold, and must go on replaying until they are closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment

from activities.judging.messages import JudgeTurn
from clawloop.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested
from clawloop.ids import new_feedback_id, new_turn_id
from clawloop.temporal.client import register_search_attributes
from clawloop.temporal.plugin import connect
from tests.replay import engine_paths, rollout_paths, training_paths
from tests.workflows.conftest import Conversation, ScriptedActivities, until, working
from workflows.state import INBOX_LIMIT

HISTORIES = Path(__file__).with_name("histories")
Scenario = Callable[[Client, ScriptedActivities], Awaitable[Conversation]]


async def ended_by_the_client(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    for version in (0, 0, 1):
        await talk.say(version=version)
    await talk.say(ends=True)
    return talk


async def opened(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    await talk.say(opens=True, version=1)
    await talk.say()
    await talk.say(ends=True)
    return talk


async def late_older_turn(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    older, newest = new_turn_id(), new_turn_id()
    scripted.gate.clear()
    await talk.say(turn_id=newest, ends=True)
    await until(lambda: len(scripted.judged) == 1)
    await talk.say(turn_id=older)
    scripted.gate.set()
    return talk


async def idle(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client, timedelta(seconds=1))
    await talk.say()
    await asyncio.sleep(0.5)
    await talk.say()
    return talk


async def told_twice_and_at_once(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    scripted.seconds = 0.2
    turns = [await talk.say() for _ in range(8)]
    for turn in turns:
        await talk.say(turn_id=turn)
    await talk.say(ends=True)
    return talk


async def given_up(client: Client, scripted: ScriptedActivities) -> Conversation:
    def fails(ask: JudgeTurn) -> ApplicationError | None:
        refused = ApplicationError("the judge refused: 404", type="JudgeRefused", non_retryable=True)
        return refused if ask.give_up is None else None

    scripted.fails = fails
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def never_decided(client: Client, scripted: ScriptedActivities) -> Conversation:
    scripted.fails = lambda ask: ApplicationError("a bug", type="RecordUnusable", non_retryable=True)
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def missed_turns_at_the_close(client: Client, scripted: ScriptedActivities) -> Conversation:
    missed = [new_turn_id(), new_turn_id()]
    scripted.missed = [missed, missed[:1]]
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def direct_votes_at_the_close(client: Client, scripted: ScriptedActivities) -> Conversation:
    scripted.missed, scripted.tied = [[new_turn_id()]], [new_turn_id(), new_turn_id()]
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def feedback(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client, timedelta(seconds=1))
    turn = await talk.say()
    await until(lambda: len(scripted.judged) == 1)
    await talk.notifier.notify_feedback(talk.facts, FeedbackGiven(new_feedback_id(), turn))
    return talk


async def feedback_after_the_close(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    await talk.notifier.notify_feedback(talk.facts, FeedbackGiven(new_feedback_id(), new_turn_id()))
    return talk


async def judged_again(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client, timedelta(seconds=1))
    turn = await talk.say()
    await until(lambda: len(scripted.judged) == 1)
    await talk.notifier.rejudge(talk.facts, RejudgeRequested(turn, 1))
    return talk


async def erased(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    scripted.gate.clear()
    turns = [await talk.say() for _ in range(6)]
    await until(lambda: len(scripted.judged) == 4)
    await talk.notifier.content_erased(talk.session, ContentErased(tuple(turns), whole=True))
    scripted.gate.set()
    return talk


async def woken(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client, timedelta(seconds=0.5))
    await talk.notifier.wake(talk.facts)
    return talk


async def turn_while_closing(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    scripted.missed = [[new_turn_id()]]
    scripted.seconds = 0.3
    await talk.say(ends=True)
    await until(lambda: bool(scripted.closed))
    await talk.say()
    await talk.say(ends=True)
    return talk


async def rolled_over(client: Client, scripted: ScriptedActivities) -> Conversation:
    talk = Conversation(client)
    await talk.begin(roll_over_events=20)
    for _ in range(4):
        await talk.say()
        await asyncio.sleep(0.2)
    await talk.say(ends=True)
    return talk


async def rolled_over_with_all(client: Client, scripted: ScriptedActivities) -> Conversation:
    """More turns wait than the next run takes over, and come while this run waits for its judge to roll over."""
    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(roll_over_events=150)
    turns = [await talk.say() for _ in range(40)]
    turns.extend(await asyncio.gather(*(talk.say() for _ in range(INBOX_LIMIT))))
    scripted.gate.set()
    await until(lambda: set(turns) <= {ask.turn_id for ask in scripted.judged})
    await talk.say(ends=True)
    return talk


async def judged_together(client: Client, scripted: ScriptedActivities) -> Conversation:
    """Turns that wait are judged by one activity, which fails at first; so are those that the closing finds."""

    def fails(ask: JudgeTurn) -> ApplicationError | None:
        failed = len(scripted.judged) == 10
        return ApplicationError("the judge is away", type="JudgeUnavailable") if failed else None

    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(in_flight=1)
    await talk.say()
    await until(lambda: len(scripted.judged) == 1)
    for _ in range(10):
        await talk.say()
    scripted.fails, scripted.missed = fails, [[new_turn_id() for _ in range(9)]]
    scripted.gate.set()
    await talk.say(ends=True)
    return talk


async def all_waiting_judged(client: Client, scripted: ScriptedActivities) -> Conversation:
    """Four turns are judged at once; the first of them that ends leaves its place to all that wait."""
    talk = Conversation(client)
    scripted.gate.clear()
    for running in (1, 2, 3, 4):
        await talk.say()
        await until(lambda running=running: len(scripted.judged) == running)  # type: ignore[misc]
    for _ in range(6):
        await talk.say()
    scripted.gate.set()
    await until(lambda: len(scripted.judged) == 10)
    await talk.say(ends=True)
    return talk


PATHS: tuple[Scenario, ...] = (
    ended_by_the_client,
    opened,
    late_older_turn,
    idle,
    told_twice_and_at_once,
    given_up,
    never_decided,
    missed_turns_at_the_close,
    direct_votes_at_the_close,
    feedback,
    feedback_after_the_close,
    judged_again,
    erased,
    woken,
    turn_while_closing,
    rolled_over,
    rolled_over_with_all,
    judged_together,
    all_waiting_judged,
)


async def record(names: Sequence[str] = ()) -> None:
    """Record these paths, or all."""
    program = Path(sys.executable).with_name("temporal")
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=str(program)) as environment:
        client = await connect(environment.client.service_client.config.target_host)
        await register_search_attributes(client)
        for path in (path for path in PATHS if not names or path.__name__ in names):
            scripted = ScriptedActivities()
            async with working(client, scripted):
                talk = await path(client, scripted)
                described = await talk.handle.describe()
                first = described.raw_description.workflow_execution_info.first_run_id
                await talk.handle.result()
                handle = client.get_workflow_handle(described.id, run_id=first)
                history = await handle.fetch_history()
            keep(path.__name__, history)
        for learning in (path for path in training_paths.PATHS if not names or path.__name__ in names):
            keep(learning.__name__, await training_paths.history(client, learning))
        for serving in (path for path in engine_paths.PATHS if not names or path.__name__ in names):
            keep(serving.__name__, await engine_paths.history(client, serving))
        for rollout in (path for path in rollout_paths.PATHS if not names or path.__name__ in names):
            keep(rollout.__name__, await rollout_paths.history(client, rollout))


def keep(name: str, history: WorkflowHistory) -> None:
    """Save a history for test_replay.py."""
    kept = _without(json.loads(history.to_json()), ("stackTrace", "identity", "workerControlTaskQueue"))
    (HISTORIES / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def _without(value: Any, names: tuple[str, ...]) -> Any:
    """A history without what tells of the machine it was recorded on."""
    if isinstance(value, dict):
        if "normalName" in value:  # a worker's own queue is named after its process
            value = value | {"name": value["normalName"]}
        return {name: _without(inner, names) for name, inner in value.items() if name not in names}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    HISTORIES.mkdir(exist_ok=True)
    asyncio.run(record(sys.argv[1:]))
