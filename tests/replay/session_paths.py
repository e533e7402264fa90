"""Paths through a session's workflow whose histories are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError

from activities.judging.judge_turn import JudgeTurn
from clawloop.core.contracts.notices import SessionErased, SessionNotice
from clawloop.core.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested
from clawloop.core.ids import new_feedback_id, new_turn_id
from tests.workflows.conftest import Conversation, ScriptedActivities, until, working
from workflows.state import INBOX_LIMIT

Path = Callable[[Client, ScriptedActivities], Awaitable[Conversation]]


async def ended_by_the_client(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The turn that opens the session starts no judging; another version answers; the last turn ends the session."""
    talk = Conversation(client)
    await talk.say(opens=True)
    for judged, version in enumerate((0, 1), start=1):
        await talk.say(version=version)
        await until(lambda judged=judged: len(scripted.judged) == judged)  # type: ignore[misc]
    await talk.say(ends=True)
    return talk


async def late_older_turn(client: Client, scripted: ScriptedActivities) -> Conversation:
    """A turn is signalled after the newer one that ends the session, which ends all the same."""
    talk = Conversation(client)
    older, newest = new_turn_id(), new_turn_id()
    scripted.gate.clear()
    await talk.say(turn_id=newest, ends=True)
    await until(lambda: len(scripted.judged) == 1)
    await talk.say(turn_id=older)
    scripted.gate.set()
    return talk


async def idle(client: Client, scripted: ScriptedActivities) -> Conversation:
    """A turn moves the deadline, at which the session closes."""
    talk = Conversation(client, timedelta(seconds=1))
    await talk.say()
    await asyncio.sleep(0.5)
    await talk.say()
    return talk


async def signalled_twice(client: Client, scripted: ScriptedActivities) -> Conversation:
    """A turn and an operator's request are signalled twice, and each is judged once."""
    talk = Conversation(client)
    scripted.gate.clear()
    turn = await talk.say()
    await talk.say(turn_id=turn)
    for _ in range(2):
        await talk.notifier.notify(SessionNotice(talk.facts, RejudgeRequested(turn, 1)))
    await until(lambda: len(scripted.judged) == 2)
    scripted.gate.set()
    await talk.say(ends=True)
    return talk


async def given_up(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The judge refuses a turn, which is decided with the stored votes."""

    def fails(ask: JudgeTurn) -> ApplicationError | None:
        refused = ApplicationError("the judge refused: 404", type="JudgeRefused", non_retryable=True)
        return refused if ask.give_up is None else None

    scripted.fails = fails
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def never_decided(client: Client, scripted: ScriptedActivities) -> Conversation:
    """A turn cannot be decided with the stored votes either, and is left to the closing."""
    scripted.fails = lambda ask: ApplicationError("a bug", type="RecordUnusable", non_retryable=True)
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def missed_turns_at_the_close(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The closing finds turns that were never judged, and one of them once more, which it gives up."""
    missed = [new_turn_id(), new_turn_id()]
    scripted.missed = [missed, missed[:1]]
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def direct_votes_at_the_close(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The votes cancel out, so the closing asks for direct votes, one of which fails."""
    scripted.missed, scripted.tied = [[new_turn_id()]], [new_turn_id(), new_turn_id()]
    refused = ApplicationError("the judge refused: 404", type="JudgeRefused", non_retryable=True)
    scripted.fails = lambda ask: refused if ask.turn_id == scripted.tied[0] else None
    talk = Conversation(client)
    await talk.say(ends=True)
    return talk


async def judged_again(client: Client, scripted: ScriptedActivities) -> Conversation:
    """A turn is judged by what follows it, by feedback, and as an operator asked."""
    talk = Conversation(client, timedelta(seconds=1))
    turn = await talk.say()
    await until(lambda: len(scripted.judged) == 1)
    await talk.notifier.notify(SessionNotice(talk.facts, FeedbackGiven(new_feedback_id(), turn)))
    await until(lambda: len(scripted.judged) == 2)
    await talk.notifier.notify(SessionNotice(talk.facts, RejudgeRequested(turn, 1)))
    return talk


async def feedback_to_an_open_session(client: Client, scripted: ScriptedActivities) -> Conversation:
    """Feedback starts the workflow, which finds the session open and waits for its deadline."""
    scripted.open_after_all = True
    talk = Conversation(client, timedelta(seconds=1))
    await talk.notifier.notify(SessionNotice(talk.facts, FeedbackGiven(new_feedback_id(), new_turn_id())))
    return talk


async def feedback_after_the_close(client: Client, scripted: ScriptedActivities) -> Conversation:
    """Feedback starts the workflow of a closed session, which closes again at once."""
    talk = Conversation(client)
    await talk.notifier.notify(SessionNotice(talk.facts, FeedbackGiven(new_feedback_id(), new_turn_id())))
    return talk


async def erased(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The session is erased while turns are judged and others wait; it closes."""
    talk = Conversation(client)
    scripted.gate.clear()
    await talk.begin(in_flight=1)
    turns = [await talk.say()]
    await until(lambda: len(scripted.judged) == 1)
    turns.append(await talk.say())
    await talk.notifier.notify(SessionErased(talk.session, ContentErased(tuple(turns), whole=True)))
    scripted.gate.set()
    return talk


async def woken(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The sweep wakes a session that was left open; it closes at its deadline."""
    talk = Conversation(client, timedelta(seconds=0.5))
    await talk.notifier.notify(SessionNotice(talk.facts, None))
    return talk


async def turn_while_closing(client: Client, scripted: ScriptedActivities) -> Conversation:
    """A turn arrives during the closing, so the session goes on."""
    talk = Conversation(client)
    scripted.missed = [[new_turn_id()]]
    scripted.seconds = 0.3
    await talk.say(ends=True)
    await until(lambda: bool(scripted.closed))
    await talk.say()
    await talk.say(ends=True)
    return talk


async def rolled_over(client: Client, scripted: ScriptedActivities) -> Conversation:
    """The history is long enough: the workflow continues as new."""
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
    """Turns that wait are judged by one activity, which is retried; so are those that the closing finds."""

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


PATHS: tuple[Path, ...] = (
    ended_by_the_client,
    late_older_turn,
    idle,
    signalled_twice,
    given_up,
    never_decided,
    missed_turns_at_the_close,
    direct_votes_at_the_close,
    judged_again,
    feedback_to_an_open_session,
    feedback_after_the_close,
    erased,
    woken,
    turn_while_closing,
    rolled_over,
    rolled_over_with_all,
    judged_together,
)


async def history(client: Client, path: Path) -> WorkflowHistory:
    """What the first run of a workflow on this path leaves behind."""
    scripted = ScriptedActivities()
    async with working(client, scripted):
        talk = await path(client, scripted)
        described = await talk.handle.describe()
        await talk.handle.result()
        first = described.raw_description.workflow_execution_info.first_run_id
        return await client.get_workflow_handle(described.id, run_id=first).fetch_history()
