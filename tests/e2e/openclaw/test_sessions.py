"""The real OpenClaw: every request in the right session, of the right kind, with the right next state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.openclaw.configurations import NAMES, configuration
from tests.e2e.openclaw.recorded import Session, by_conversation, check_chain, check_kinds, read_back
from tests.e2e.openclaw.resident import OpenClaw, running_openclaw
from tests.e2e.openclaw.script import TOOL
from tests.e2e.openclaw.stack import Stack

PARALLEL = 8
TURNS = 3
# 9,000 tokens: with the 9,000 of OpenClaw's own prompt the second message is over what it compacts at.
FILLER = "All of this has to be kept in mind. " * 1000
LONG_TURNS = 5
# As its Telegram channel queues it.
REACTION = "Telegram reaction added: 👍 by Alice (@alice) on msg 42"


@pytest.mark.parametrize("name", NAMES)
async def test_conversations_are_sessions(name: str, stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "openclaw"
    made = partial(configuration, name, folder=folder, gateway=stack.url, key=stack.key)
    async with running_openclaw(folder, made) as client:
        async with asyncio.TaskGroup() as group:
            for number in range(PARALLEL):
                group.create_task(converse(client, f"p{number}", TURNS))
        await converse(client, "long", LONG_TURNS, FILLER)
        await main_conversation(client, stack)
        sessions = await read_back(stack)
    check_kinds(sessions)
    found = by_conversation(sessions)
    assert found.keys() == {*(f"p{number}" for number in range(PARALLEL)), "long", "main"}
    for number in range(PARALLEL):
        check_chain(found[f"p{number}"], TURNS)
    check_compacted(found["long"])
    check_chain(found["main"], 2)
    await check_rated(stack, found["main"])
    chores = {turn.about.what for session in sessions for turn in session.turns if not turn.main}
    assert {"compaction", "memory flush", "heartbeat"} <= chores
    print(report(name, sessions))  # noqa: T201
    await check_erased(stack, found["long"], sessions)


async def converse(client: OpenClaw, conversation: str, turns: int, filler: str = "") -> None:
    """Every second message makes the agent run a command."""
    for number in range(1, turns + 1):
        mark = f"ask-{conversation}-{number}"
        text = f"This is {mark}{f', {TOOL}' if number % 2 == 0 else ''}. {filler}"
        assert await client.say(text, conversation) == f"The answer to {mark}."


async def main_conversation(client: OpenClaw, stack: Stack) -> None:
    """A heartbeat between two messages of the session that heartbeats belong to."""
    assert await client.say("This is ask-main-1.", "main") == "The answer to ask-main-1."
    await client.command("system", "event", "--text", REACTION, "--mode", "now")
    await stack.asked_for("heartbeat")
    assert await client.say("This is ask-main-2.", "main") == "The answer to ask-main-2."


async def check_rated(stack: Stack, session: Session) -> None:
    """The reaction that a heartbeat passed on is a rating of the reply before it."""
    async with stack.admin() as client:
        details = [(await client.get(f"/admin/v1/turns/{turn.view['id']}")).json() for turn in session.main]
    assert [[given["score"] for given in detail["judged"]["feedback"]] for detail in details] == [[1.0], []]


async def check_erased(stack: Stack, session: Session, sessions: Sequence[Session]) -> None:
    """With a session go its summaries, memory flushes and recaps, whichever sessions these are in, and nothing else."""
    turns = [turn for each in sessions for turn in each.turns]
    quoting = [turn for turn in turns if "ask-long-" in json.dumps([turn.messages, turn.reply])]
    assert {"turn", "compaction", "memory flush"} <= {turn.about.what for turn in quoting}
    others = [turn for turn in turns if turn.main and turn not in quoting]
    assert others
    async with stack.admin() as client:
        answer = await client.delete(f"/admin/v1/sessions/{session.view['id']}")
        assert answer.status_code == 200, answer.text
        for turn in quoting:
            left = await client.get(f"/admin/v1/turns/{turn.view['id']}")
            assert (left.status_code, left.json()["messages"]) == (200, []), (turn.about, turn.view)
            assert "ask-long-" not in left.text
        for turn in others:
            kept = await client.get(f"/admin/v1/turns/{turn.view['id']}")
            assert kept.json()["messages"] == turn.messages


def check_compacted(session: Session) -> None:
    """All answers of a compacted conversation are in one session, those before the summary too."""
    answers = [turn.about.number for turn in session.main if not turn.calls]
    assert answers == list(range(1, LONG_TURNS + 1))


def report(name: str, sessions: list[Session]) -> str:
    counts: dict[str, int] = {}
    for session in sessions:
        for turn in session.turns:
            what = f"{turn.view['kind']} {turn.about.what}"
            counts[what] = counts.get(what, 0) + 1
    return f"{name}: {len(sessions)} sessions; " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
