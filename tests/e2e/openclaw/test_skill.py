"""Our skill and our slash command inside the real OpenClaw."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clawloop.app.processes.endpoints import RuntimeAddresses, write_runtime_file
from tests.e2e.openclaw.configurations import ROOT, configuration
from tests.e2e.openclaw.recorded import Session, by_conversation, read_back
from tests.e2e.openclaw.resident import running_openclaw
from tests.e2e.openclaw.script import RUN, SKILL
from tests.e2e.openclaw.stack import Stack

OURS = ROOT / "deploy" / "openclaw"
# What stands for something else in the skill's commands.
FILLED = {"TEXT": "Shorter, please.", "REASON": "for a moment", "ID": "last"}
EXPECTED = {
    "clawloop feedback up": "Saved; it changes this reply's verdict before training.",
    "clawloop status": "1 of 1 take requests",
    "clawloop training status": "samples",
    "clawloop session list --limit 5": "skill",
    "clawloop training pause": "paused",
    "clawloop training resume": "",
}


def skill_commands() -> list[str]:
    """Each command of the skill's tables."""
    tables = "\n".join(line for line in (OURS / "SKILL.md").read_text().splitlines() if line.startswith("|"))
    commands = re.findall(r"`(clawloop [^`]+)`", tables)
    for word, meant in FILLED.items():
        commands = [re.sub(rf"\b{word}\b", meant, command) for command in commands]
    return commands


async def test_the_agent_uses_the_skill_and_people_the_command(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "openclaw"
    (stack.data / "keys.json").write_text(json.dumps({"chat": stack.key, "admin": stack.admin_key}))
    write_runtime_file(stack.data, RuntimeAddresses(stack.database_url, stack.temporal, None, stack.url, None))

    def configure(own: dict[str, Any]) -> dict[str, Any]:
        skill = folder / "workspace" / "skills" / "clawloop"
        skill.mkdir(parents=True)
        shutil.copy(OURS / "SKILL.md", skill)
        own["plugins"] = {"load": {"paths": [str(OURS / "plugin")]}, "entries": {"clawloop": {"enabled": True}}}
        return configuration("ours", own, folder, stack.url, stack.key)

    commands = skill_commands()
    async with running_openclaw(folder, configure, CLAWLOOP_DATA=str(stack.data)) as client:
        await client.say("This is ask-skill-1.", "skill")
        await client.say(f"This is ask-skill-2, {SKILL}, {RUN}{commands[0]}", "skill")
        for number, command in enumerate(commands[1:], 3):
            await client.say(f"This is ask-skill-{number}, {RUN}{command}", "skill")
        await client.type("/rate down", "skill")
        await client.type("/rate It is too short.", "skill")
        session = by_conversation(await read_back(stack))["skill"]
        check_printed(session, commands)
        given = await feedback_on(stack, session, 5)
    # A thumb of the agent is for the answer before the message that asked for it.
    assert given == {
        1: [(1.0, None)],
        2: [(-1.0, None)],
        3: [(None, FILLED["TEXT"])],
        len(commands) + 1: [(-1.0, None), (None, "It is too short.")],
    }


def check_printed(session: Session, commands: Sequence[str]) -> None:
    """The skill was read, and each command of it printed what it is for."""
    printed = results(session)
    assert "# Clawloop" in printed[2][0]
    for number, command in enumerate(commands, 2):
        said = printed[number][-1]
        assert "clawloop:" not in said, f"{command}: {said}"
        expected = [text for begin, text in EXPECTED.items() if command.startswith(begin)]
        assert all(text in said for text in expected), f"{command}: {said}"


def results(session: Session) -> dict[int, list[str]]:
    """What the tools printed, by the message they ran for."""
    found: dict[int, list[str]] = {}
    for turn in session.main:
        if turn.calls:
            found.setdefault(turn.about.number or 0, []).append(str(turn.followed_by[0]["content"]))
    return found


async def feedback_on(stack: Stack, session: Session, count: int) -> dict[int, list[tuple[float | None, str | None]]]:
    """The feedback on the answers to each message, once there is so much."""
    answers = {turn.about.number or 0: turn.view["id"] for turn in session.main if not turn.calls}
    async with stack.admin() as client, asyncio.timeout(120):
        while True:
            kept = {}
            for number, turn in answers.items():
                detail = (await client.get(f"/admin/v1/turns/{turn}")).json()
                if given := [(one["score"], one["text"]) for one in detail["judged"]["feedback"]]:
                    kept[number] = given
            if sum(map(len, kept.values())) >= count:
                return kept
            await asyncio.sleep(0.5)
