"""OpenCode, unchanged, at work against the gateway: a conversation with a tool, a sub-agent and a compaction."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.turns import StoredTurn, TurnKind
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.clients.packages import opencode
from tests.fakes.replies import Reply

__all__ = ["gateway", "shared_gateway"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Beyond what a message to a scripted engine takes on a busy machine.
RUN_SECONDS = 300
CONTEXT, REPLY = 40_000, 4_000
DELEGATED = "Name the files."


def script(body: dict[str, Any]) -> Reply:
    last = body["messages"][-1]
    said = str(last["content"])
    if last["role"] == "tool":
        return Reply("Done.")
    if "<conversation>" in said:
        return Reply("A greeting was written.")
    if "greeting" in said:
        return Reply("I write it.", [("bash", {"command": "echo good morning", "description": "Greet"})])
    if "delegate" in said:
        call = {"description": "look", "prompt": DELEGATED, "subagent_type": "general"}
        return Reply("I delegate.", [("task", call)])
    return Reply("It is ten.", prompt_tokens=CONTEXT - 500 if "long" in said else None)


async def run(gateway: Gateway, home: Path, *arguments: str) -> None:
    program = await asyncio.to_thread(opencode)
    models = {"policy": {"name": "policy", "limit": {"context": CONTEXT, "output": REPLY}}}
    options = {"baseURL": f"{gateway.url}/v1", "apiKey": gateway.key}
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow", "task": "allow"},
        "model": "clawloop/policy",
        "small_model": "clawloop/policy",
        "provider": {
            "clawloop": {"npm": "@ai-sdk/openai-compatible", "name": "c", "options": options, "models": models}
        },
    }
    (home / "opencode.json").write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        *(str(program), "run", *arguments),
        cwd=home / "project",
        env={
            **{"HOME": str(home), "PATH": "/usr/bin:/bin", "OPENCODE_CONFIG": str(home / "opencode.json")},
            **{"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(RUN_SECONDS):
        printed, errors = await process.communicate()
    assert process.returncode == 0, (printed.decode()[-4000:], errors.decode()[-4000:])


async def test_opencode_works_in_one_session_and_its_chores_are_side_turns(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    gateway.engine.script = script
    await run(gateway, tmp_path, "Write a greeting.")
    for said in ("Now delegate.", "A long one.", "Thank you."):
        await run(gateway, tmp_path, "--continue", said)
    turns = [turn for record in await gateway.recorded(10) if (turn := await gateway.turns.load(record.turn_id))]
    assert {turn.record.kind_reason for turn in turns if turn.record.kind is TurnKind.SIDE} == {
        "known side prompt: title",
        "known side prompt: compaction",
        "header x-parent-session-id: sub-agent of OpenCode",
    }
    main = [turn for turn in turns if turn.record.kind is TurnKind.MAIN]
    assert len({turn.session_id for turn in main}) == 1
    assert [asked(turn) for turn in main] == [
        *("Write a greeting.", "tool", "Now delegate.", "tool", "A long one."),
        *("Continue if you have next steps, or stop and ask for", "Thank you."),
    ]
    before_compaction = main[:5]
    assert [turn.parent_turn_id for turn in before_compaction] == [
        None,
        *(turn.record.turn_id for turn in before_compaction[:-1]),
    ]
    assert main[6].parent_turn_id == main[5].record.turn_id


def asked(turn: StoredTurn) -> str:
    last = turn.record.messages[-1]
    return "tool" if last["role"] == "tool" else str(last["content"]).strip('"\n ')[:52].strip()
