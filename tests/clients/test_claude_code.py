"""A coding agent that speaks Anthropic's Messages, unchanged, at work against the gateway."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.turns import SessionSource, StoredTurn, TurnKind, TurnStatus
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.clients.packages import NODE, claude_code
from tests.fakes.engine import PROMPT_IDS
from tests.fakes.replies import Reply

__all__ = ["gateway", "shared_gateway"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SESSION = "0b6c1d2e-1111-4222-8333-444455556666"
ASKED = "Write a greeting into hello.txt and show it."
GREETING = "good morning"
SAID = "The file has the greeting."
# Beyond what a turn of a scripted engine takes on a busy machine.
RUN_SECONDS = 300


def script(file: Path, body: dict[str, Any]) -> Reply:
    """Write the file, show it, say so; then every message is answered at once. Requests without tools are chores."""
    if not body.get("tools"):
        return Reply("A greeting")
    match sum(message["role"] == "tool" for message in body["messages"]):
        case 0:
            return Reply("I write it.", [("Write", {"file_path": str(file), "content": GREETING})])
        case 1:
            return Reply(calls=[("Bash", {"command": f"cat {file.name}", "description": "Show the file"})])
    return Reply(SAID)


async def run(gateway: Gateway, project: Path, said: str, *options: str) -> dict[str, Any]:
    """What Claude Code prints after one message."""
    program = await asyncio.to_thread(claude_code)
    settings = {
        "HOME": str(project.parent),
        "PATH": os.pathsep.join([str(NODE.parent), "/usr/bin", "/bin"]),
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_API_KEY": gateway.key,
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy-side",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [*program, "-p", said, "--output-format", "json", "--allowedTools", "Write", "Bash(cat:*)"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *options,
        cwd=project,
        env=settings,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(RUN_SECONDS):
        printed, errors = await process.communicate()
    assert process.returncode == 0, (printed.decode()[-4000:], errors.decode()[-4000:])
    result: dict[str, Any] = json.loads(printed.decode().splitlines()[-1])
    return result


async def test_claude_code_works_in_one_session(gateway: Gateway, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    gateway.engine.script = partial(script, project / "hello.txt")
    first = await run(gateway, project, ASKED, "--session-id", SESSION)
    second = await run(gateway, project, "Thank you.", "--resume", SESSION)
    assert (first["result"], second["result"]) == (SAID, SAID)
    assert (project / "hello.txt").read_text() == GREETING
    turns = [await stored(gateway, record.turn_id) for record in gateway.turns.records]
    main = [turn for turn in turns if turn.record.kind is TurnKind.MAIN]
    assert len({turn.session_id for turn in main}) == 1
    assert {turn.record.evidence.value for turn in main} == {SESSION}
    assert {turn.record.evidence.source for turn in main} == {SessionSource.CLAUDE_CODE}
    assert [turn.record.finish_reason for turn in main] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert [turn.parent_turn_id for turn in main] == [None, *(turn.record.turn_id for turn in main[:-1])]
    for turn in main:
        record = turn.record
        assert (record.status, record.prompt_ids) == (TurnStatus.COMPLETE, PROMPT_IDS)
        assert record.response_ids
        assert record.logprobs == [-token / 100 for token in record.response_ids]
    results = [message for message in main[-1].record.messages if message["role"] == "tool"]
    assert GREETING in str(results[1]["content"])


async def test_compact_is_a_chore_of_the_same_session(gateway: Gateway, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    session = "0b6c1d2e-1111-4222-8333-444455557777"
    gateway.engine.script = lambda body: Reply(
        "<summary>Time was asked for.</summary>" if compacts(body) else "It is ten."
    )
    await run(gateway, project, "What time is it?", "--session-id", session)
    await run(gateway, project, "/compact", "--resume", session)
    await run(gateway, project, "No, that was wrong.", "--resume", session)
    turns = [await stored(gateway, record.turn_id) for record in await gateway.recorded(3)]
    assert len({turn.session_id for turn in turns}) == 1
    assert [turn.record.kind for turn in (turns[0], turns[-1])] == [TurnKind.MAIN, TurnKind.MAIN]
    assert {turn.record.kind_reason for turn in turns[1:-1]} == {"known side prompt: compaction"}
    assert turns[-1].parent_turn_id is None  # its history begins anew, with the summary


async def test_a_sub_agent_is_a_chore_of_its_session(gateway: Gateway, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    session = "0b6c1d2e-1111-4222-8333-444455558888"

    def delegating(body: dict[str, Any]) -> Reply:
        names = {tool["function"]["name"] for tool in body.get("tools") or ()}
        said = [message for message in body["messages"] if message["role"] != "system"]
        if "Agent" in names and "Look around" in str(said[-1]):
            call = {"description": "look", "prompt": "Name the files.", "subagent_type": "general-purpose"}
            return Reply("I delegate.", [("Agent", call)])
        return Reply("There is nothing.")

    gateway.engine.script = delegating
    await run(gateway, project, "Look around.", "--session-id", session, "--allowedTools", "Agent")
    turns = [await stored(gateway, record.turn_id) for record in await gateway.recorded(3)]
    assert len({turn.session_id for turn in turns}) == 1
    assert "sub-agent of Claude Code" in {turn.record.kind_reason for turn in turns}
    of_agent = [turn for turn in turns if "I delegate." not in str(turn.record.messages)][1:]
    assert of_agent
    assert {turn.record.kind for turn in of_agent} == {TurnKind.SIDE}


def compacts(body: dict[str, Any]) -> bool:
    return "Respond with TEXT ONLY" in str(body["messages"][-1])


async def stored(gateway: Gateway, turn: Any) -> StoredTurn:
    found = await gateway.turns.load(turn)
    assert found is not None
    return found
